"""The keys that change colours: what they mean on the map, the ramp, the theme."""

from __future__ import annotations

from textual.app import App

from vtoken_console.app.session import Session
from vtoken_console.look.appearance import Appearance
from vtoken_console.look.diff_renderer import set_color_system
from vtoken_console.look.themes import DEPTHS, NAMES, SYSTEMS
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.widgets.heatmap.colouring import MODES, Mode


class Colours:
    """`look`: what the viewer chose. Every change is in the next frame, for which it asks."""

    def __init__(
        self, app: App[int], session: Session, dashboard: Dashboard, look: Appearance
    ) -> None:
        self._app = app
        self._session = session
        self._dashboard = dashboard
        self.look = look
        self._wear()

    def next_mode(self) -> None:
        at = MODES.index(self._dashboard.heatmap.mode)
        self.set_mode(MODES[(at + 1) % len(MODES)])

    def set_mode(self, mode: Mode) -> None:
        """What the heatmap's colours mean from now on."""
        self._dashboard.heatmap.set_mode(mode)
        model = self._session.model
        if mode is Mode.OWNER and model is not None and not len(model.owner):
            self._dashboard.say("This server does not tell the owners of blocks.", is_error=True)
        else:
            self._dashboard.say(f"Colour by {mode.value}: {mode.summary}.")

    def next_ramp(self) -> None:
        names = self.look.ramp_names
        at = names.index(self.look.ramp_name) if self.look.ramp_name in names else -1
        self.set_ramp(names[(at + 1) % len(names)])

    def set_ramp(self, name: str) -> None:
        self.look = self.look.with_ramp(name)
        self._dashboard.say(f"Colours: {name}: {self.look.ramp.summary}.")
        self._dashboard.ask_for_frame()

    def next_theme(self) -> None:
        at = NAMES.index(self.look.theme.name)
        self.set_theme(NAMES[(at + 1) % len(NAMES)], self.look.theme.depth)

    def next_depth(self) -> None:
        at = DEPTHS.index(self.look.theme.depth)
        self.set_theme(self.look.theme.name, DEPTHS[(at + 1) % len(DEPTHS)])

    def set_theme(self, name: str, depth: str) -> None:
        """Another theme, at once."""
        self.look = self.look.with_theme(name, depth)
        self._wear()
        self._dashboard.say(
            f"Theme: {name}, {depth} colours." if depth != "truecolor" else f"Theme: {name}."
        )
        self._dashboard.ask_for_frame()

    def _wear(self) -> None:
        """Gives Textual the theme, and the terminal's colours."""
        theme = self.look.theme
        self._app.register_theme(theme.for_textual())
        self._app.theme = theme.full_name
        set_color_system(self._app, SYSTEMS[theme.depth])
