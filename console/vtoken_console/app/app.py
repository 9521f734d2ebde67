"""The console application: one worker for the network, one timer for the screen.

Composes the parts; each implements the keys of one subject. A source updates the model; `tick`
draws the newest model `fps` times a second, independently of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console
from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.screen import Screen

from vtoken_console.app.colours import Colours
from vtoken_console.app.controls import Controls
from vtoken_console.app.exporter import Exporter
from vtoken_console.app.frames import Frames
from vtoken_console.app.guidance import Guidance
from vtoken_console.app.key_queue import KeyQueue
from vtoken_console.app.keyfile import keymap
from vtoken_console.app.pages import Pages
from vtoken_console.app.replay_controls import ReplayControls
from vtoken_console.app.session import Session
from vtoken_console.feed.source import Source
from vtoken_console.frame.cost import Cost
from vtoken_console.frame.guide import seen_path
from vtoken_console.frame.keys import DASHBOARD_KEYS, GLOBAL, KEYS, Key
from vtoken_console.frame.terminal import Terminal
from vtoken_console.frame.view import View
from vtoken_console.screens.dashboard import VIEWS, Dashboard
from vtoken_console.style.appearance import Appearance, choose
from vtoken_console.style.breakpoints import HEIGHT_CLASSES, WIDTH_CLASSES
from vtoken_console.style.themes import DEPTHS, NAMES
from vtoken_console.widgets.heatmap.colouring import MODES
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.lines import LinesWidget
from vtoken_console.widgets.replay_bar import ReplayBar


class ConsoleApp(App[int]):
    """`fps` frames a second at most; `read_only` disables controls whatever the server grants.

    `recording`: a file to play from `moment` on instead of connecting to a server.
    """

    TITLE = "vToken"
    CSS_PATH = "console.tcss"
    HORIZONTAL_BREAKPOINTS = WIDTH_CLASSES
    VERTICAL_BREAKPOINTS = HEIGHT_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(
                k.keys,
                f"do('{k.id}')",
                k.label,
                id=k.id,
                key_display=k.shown,
                show=False,
                priority=k.id == "skip-guide",  # works on every page
            )
            for k in DASHBOARD_KEYS
        ),
        *(Binding(key, f"replay('{what}')", show=False) for key, what in ReplayControls.KEYS),
    ]

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        read_only: bool = False,
        fps: float = 10.0,
        appearance: Appearance | None = None,
        recording: Path | None = None,
        moment: str | None = None,
        keys: tuple[Key, ...] = KEYS,
        guided: bool = False,
    ) -> None:
        self.terminal = Terminal()  # Textual calls get_driver_class in its __init__
        super().__init__()
        # `Terminal` reduces the colours to those of the theme, which can change.
        self.console = Console(
            color_system="truecolor", file=self.console.file, force_terminal=True, no_color=False
        )
        self.cost = Cost()
        self.keys = keys
        self.max_fps = fps
        self.dashboard = Dashboard(keys)
        self.session = Session(
            url, token=token, fps=fps, read_only=read_only, recording=recording, moment=moment
        )
        appearance = appearance or choose(depth="truecolor")
        self.colours = Colours(self, self.terminal, self.session, self.dashboard, appearance)
        self.guidance = Guidance(self, self.dashboard, wanted=guided)
        self.frames = Frames(
            self.session,
            self.dashboard,
            self.colours,
            self.guidance,
            self.cost,
            self.terminal,
            keys,
            fps,
        )
        self.pages = Pages(self, self.session, self.dashboard)
        self.controls = Controls(self, self.session, self.frames, self.dashboard)
        self.replay = ReplayControls(self.session, self.dashboard)
        self.exporter = Exporter(self, self.session, self.frames, self.dashboard)
        self.actions = self._make_actions()
        self._key_queue = KeyQueue(self, super().on_event)
        self._dimmed_drawn_at = 0.0  # when the dashboard was last drawn behind a page

    @property
    def source(self) -> Source | None:
        """The server or recording on the screen; None until its libraries are imported."""
        return self.session.source

    def get_driver_class(self) -> type[Driver]:
        return self.terminal.driver_class(super().get_driver_class())

    def get_default_screen(self) -> Screen[Any]:
        return self.dashboard

    def on_mount(self) -> None:
        ascii_only = self.colours.appearance.ascii_only
        self.set_class(ascii_only, "-ascii")
        self.dashboard.set_class(ascii_only, "-ascii")
        self.set_keymap(keymap(self.keys))
        self.call_after_refresh(self._start)
        self.call_later(self.tick)

    def _start(self) -> None:
        self.tick()
        self.run_worker(self.session.run(), name="network", exit_on_error=True)
        self.set_interval(1 / self.max_fps, self.tick, name="frame")

    # ------------------------------------------------------------ frames

    def tick(self) -> None:
        """Draws one frame: the newest model on every visible screen."""
        now = time.monotonic()
        if self.terminal.is_behind:
            return
        self.frames.begin(now)
        view = self.frames.view()
        self.controls.announce(view)
        self.guidance.update(view)
        # Behind a page, the dashboard is dimmed and drawn in full: once a second is enough.
        draw_dimmed = now - self._dimmed_drawn_at >= 1.0
        if draw_dimmed:
            self._dimmed_drawn_at = now
        for screen in self.screen_stack:
            drawn = screen is self.screen or (draw_dimmed and screen is self.dashboard)
            if drawn and screen.is_mounted:
                _show(screen, view)

    def on_dashboard_frame_requested(self) -> None:
        self.tick()

    # ------------------------------------------------------------ keys

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Resize):
            self.terminal.resize(*event.size)
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            await self._key_queue.put(event)
        else:
            await super().on_event(event)

    async def on_key_queue_handled(self) -> None:
        await self._key_queue.handled()

    async def on_heatmap_zoom_requested(self, event: Heatmap.ZoomRequested) -> None:
        await self.pages.zoom_step(slots=event.slots)

    def on_replay_bar_moment_entered(self, message: ReplayBar.MomentEntered) -> None:
        self.replay.seek_text(message.text)

    def on_replay_bar_seek_requested(self, message: ReplayBar.SeekRequested) -> None:
        self.replay.seek_share(message.share)

    # ------------------------------------------------------------ actions

    def _make_actions(self) -> dict[str, Callable[[], Any]]:
        """What each key of the dashboard does, by the key's id."""
        settings = ("policy", "theta-f", "batch-size", "budget-tokens")
        return {
            "pause": self.controls.pause,
            "compact": self.controls.compact,
            "compact-dry": self.controls.compact_dry,
            "undo": self.controls.undo,
            "undo-dry": self.controls.undo_dry,
            "confirm": self.controls.confirm,
            **{
                name: partial(self.controls.open_settings, name.replace("-", "_"))
                for name in settings
            },
            "zoom-in": self.pages.zoom_in,
            "zoom-out": self.dashboard.heatmap.zoom_out,
            "open": self.pages.open_chosen,
            "filter": self.dashboard.open_filter,
            "sort": self.dashboard.next_sort,
            "event-kinds": self.dashboard.next_event_kinds,
            "view": self.dashboard.next_view,
            "mode": self.colours.next_mode,
            "ramp": self.colours.next_ramp,
            "theme": self.colours.next_theme,
            "export": self.exporter.open_dialog,
            "retry": self._retry,
            "command-palette": self.action_command_palette,
            "help": self.pages.open_help,
            "skip-guide": self.guidance.skip,
            "quit": partial(self.exit, 0),
        }

    def _retry(self) -> None:
        if self.source is not None:
            self.source.retry_now()

    async def action_do(self, key_id: str) -> None:
        """Runs the action of one key."""
        running = self.actions[key_id]()
        if running is not None:
            await running

    def action_replay(self, what: str) -> None:
        self.replay.do(what)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dashboard keys work on the dashboard only, so pages on top can reuse them."""
        return action != "do" or parameters[0] in GLOBAL or self.screen is self.dashboard

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every key as a command, then views, colour ramps, colour modes and themes by name."""
        read_only = bool(self.frames.view().read_only_reason)
        for key in self.keys:
            if key.page or key.id == "command-palette" or (key.control and read_only):
                continue
            yield SystemCommand(f"{key.label} ({key.shown})", key.help, self.actions[key.id])
        for name in VIEWS:
            yield SystemCommand(
                f"view {name}", "panels to show", partial(self.dashboard.set_view, name)
            )
        appearance = self.colours.appearance
        for name in appearance.ramp_names:
            summary = appearance.theme.ramps[name].summary
            yield SystemCommand(f"ramp {name}", summary, partial(self.colours.set_ramp, name))
        for mode in MODES:
            yield SystemCommand(
                f"colour by {mode.value}", mode.summary, partial(self.colours.set_mode, mode)
            )
        for name in NAMES:
            for depth in DEPTHS:
                call = partial(self.colours.set_theme, name, depth)
                yield SystemCommand(f"theme {name}, {depth}", "colours of the console", call)


def _show(screen: Screen[Any], view: View) -> None:
    """Passes the view to a screen's own `show`, else to every panel of the screen."""
    show = getattr(screen, "show", None)
    if show is not None:
        show(view)
        return
    for panel in screen.query(LinesWidget):
        panel.show(view)


def run(
    url: str,
    *,
    token: str | None,
    read_only: bool,
    fps: float,
    ascii_only: bool = False,
    recording: Path | None = None,
    moment: str | None = None,
    theme: str = "auto",
    colors: str = "auto",
    motion: bool = True,
    keys: tuple[Key, ...] = KEYS,
    guide: Literal["once", "always"] | None = None,
) -> int:
    """Runs the console until the user quits; returns the exit code.

    `theme`: auto, dark, light. `colors`: auto, truecolor, 256, 16. ValueError for anything else.
    `guide`: show the guided first minute always, or once per user.
    """
    appearance = choose(theme, colors, ascii_only=ascii_only, motion=motion)
    app = ConsoleApp(
        url,
        token=token,
        read_only=read_only,
        fps=fps,
        appearance=appearance,
        recording=recording,
        moment=moment,
        keys=keys,
        guided=guide == "always" or (guide == "once" and not seen_path().exists()),
    )
    return app.run() or (app.return_code or 0)
