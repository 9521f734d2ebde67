"""The keys that change colours: colour mode of the heatmap, ramp, theme."""

from __future__ import annotations

from textual.app import App

from vtoken_console.app.session import Session
from vtoken_console.frame.terminal import Terminal
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.style.appearance import Appearance
from vtoken_console.style.themes import NAMES, SYSTEMS
from vtoken_console.widgets.heatmap.colouring import MODES, Mode


class Colours:
    """`appearance`: the viewer's choice. Every change requests a frame at once."""

    def __init__(
        self,
        app: App[int],
        terminal: Terminal,
        session: Session,
        dashboard: Dashboard,
        appearance: Appearance,
    ) -> None:
        self._app = app
        self._terminal = terminal
        self._session = session
        self._dashboard = dashboard
        self.appearance = appearance
        self._apply_theme()

    def next_mode(self) -> None:
        at = MODES.index(self._dashboard.heatmap.mode)
        self.set_mode(MODES[(at + 1) % len(MODES)])

    def set_mode(self, mode: Mode) -> None:
        """Sets the quantity that the heatmap's colours show."""
        self._dashboard.heatmap.set_mode(mode)
        model = self._session.model
        if mode is Mode.OWNER and model is not None and not len(model.owner):
            self._dashboard.show_message("This server does not report block owners.", is_error=True)
        else:
            self._dashboard.show_message(f"Colour by {mode.value}: {mode.summary}.")

    def next_ramp(self) -> None:
        names = self.appearance.ramp_names
        at = names.index(self.appearance.ramp_name) if self.appearance.ramp_name in names else -1
        self.set_ramp(names[(at + 1) % len(names)])

    def set_ramp(self, name: str) -> None:
        self.appearance = self.appearance.with_ramp(name)
        self._dashboard.show_message(f"Colours: {name}: {self.appearance.ramp.summary}.")
        self._dashboard.request_frame()

    def next_theme(self) -> None:
        at = NAMES.index(self.appearance.theme.name)
        self.set_theme(NAMES[(at + 1) % len(NAMES)], self.appearance.theme.depth)

    def set_theme(self, name: str, depth: str) -> None:
        self.appearance = self.appearance.with_theme(name, depth)
        self._apply_theme()
        self._dashboard.show_message(
            f"Theme: {name}, {depth} colours." if depth != "truecolor" else f"Theme: {name}."
        )
        self._dashboard.request_frame()

    def _apply_theme(self) -> None:
        """Sets Textual's theme and the number of colours sent to the terminal."""
        theme = self.appearance.theme
        self._app.register_theme(theme.for_textual())
        self._app.theme = theme.full_name
        self._terminal.set_colors(SYSTEMS[theme.depth])
