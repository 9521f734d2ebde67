"""The console application: one worker for the network, one timer for the screen.

Knows the wire only. A source feeds the newest model; `tick` draws it, `fps` times a second,
whatever the server does. Modules that need numpy or a network library are imported after the
first frame.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from vtoken_console.app.actions_control import ControlActions
from vtoken_console.app.actions_export import ExportActions
from vtoken_console.app.actions_guide import GuideActions
from vtoken_console.app.actions_look import LookActions
from vtoken_console.app.actions_replay import ReplayActions
from vtoken_console.app.keyfile import keymap
from vtoken_console.frame.guide import seen_path
from vtoken_console.frame.keys import DASHBOARD_KEYS, KEYS, Key
from vtoken_console.look.appearance import Appearance, choose
from vtoken_console.look.themes import DEPTHS, NAMES
from vtoken_console.screens.dashboard import VIEWS
from vtoken_console.widgets.heatmap.colouring import MODES

MAX_PENDING = 2  # writes that wait for the terminal
HEAVY = (
    "httpx",
    "websockets.asyncio.client",
    "vtoken_console.feed.live",
    "vtoken_console.changes.controls",
)


class ConsoleApp(ControlActions, LookActions, ReplayActions, GuideActions, ExportActions):
    """`fps` frames a second at most; `read_only` refuses controls without asking the server.

    `recording`: a file to be played, from `moment` on, instead of a server to be watched.
    """

    TITLE = "vToken"
    CSS_PATH = "console.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            k.keys,
            k.action,
            k.label,
            id=k.id,
            key_display=k.shown,
            show=False,
            priority=k.id == "skip-guide",  # on every page
        )
        for k in DASHBOARD_KEYS
    ]

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        read_only: bool = False,
        fps: float = 10.0,
        look: Appearance | None = None,
        ascii_only: bool = False,
        recording: Path | None = None,
        moment: str | None = None,
        keys: tuple[Key, ...] = KEYS,
        guided: bool = False,
    ) -> None:
        super().__init__(
            url,
            token=token,
            read_only=read_only,
            look=look or choose(depth="truecolor", ascii_only=ascii_only),
            keys=keys,
        )
        self.wear(self.look)
        if guided:
            self.start_guide()
        self.max_fps = fps
        self.recording = recording
        self.moment = moment
        self._behind_since = 0.0

    def get_default_screen(self) -> Screen[Any]:
        return self.dashboard

    def on_mount(self) -> None:
        self.set_class(self.look.ascii_only, "-ascii")
        self.dashboard.set_class(self.look.ascii_only, "-ascii")
        self.set_keymap(keymap(self.keys))
        self.call_after_refresh(self._start)
        self.call_later(self.tick)

    def _start(self) -> None:
        self.tick()
        self.run_worker(self._network(), name="network", exit_on_error=True)
        self.set_interval(1 / self.max_fps, self.tick, name="frame")

    async def _network(self) -> None:
        for name in HEAVY:
            await asyncio.to_thread(importlib.import_module, name)
        if self.recording is not None:
            from vtoken_console.feed.replay import Replay

            self.source = Replay(self.recording, moment=self.moment)
        else:
            from vtoken_console.feed.live import LiveSource

            self.source = LiveSource(self.url, self._token, self.max_fps)
        await self.source.run()

    # ------------------------------------------------------------ frames

    def tick(self) -> None:
        """Draws one frame: the newest model on every screen in sight."""
        now = time.monotonic()
        if getattr(self._driver, "pending", 0) > MAX_PENDING:
            self.cost.dropped += 1  # the terminal does not keep up: newest wins there too
            return
        if self._ticks:
            self.cost.dropped += max(0, round((now - self._ticks[-1]) * self.max_fps) - 1)
        self.cost.drawn += 1
        if self.source is not None:
            self.cost.received_bytes = self.source.feed.received_bytes
        self._ticks.append(now)
        while now - self._ticks[0] > 2.0:
            self._ticks.popleft()
        view = self.make_view()
        self.tell_changes(view)
        self.guide_on(view)
        # What lies behind a page is seen dimmed, which costs a whole screen: once a second will do.
        behind = now - self._behind_since >= 1.0
        if behind:
            self._behind_since = now
        for screen in self.screen_stack:
            show = getattr(screen, "show", None)
            drawn = screen is self.screen or (behind and screen is self.dashboard)
            if show is not None and drawn and screen.has_class("-composed"):
                show(view)

    # ------------------------------------------------------------ actions

    def action_retry(self) -> None:
        if self.source is not None:
            self.source.retry_now()

    async def action_help(self) -> None:
        from vtoken_console.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            await self.push_screen(HelpScreen())

    async def action_quit(self) -> None:
        self.exit(0)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dashboard keys work on the dashboard only, so that a page on top keeps its own."""
        mine = {k.action.partition("(")[0] for k in DASHBOARD_KEYS}
        anywhere = action in ("quit", "help", "command_palette", "skip_guide")
        return anywhere or action not in mine or self.screen is self.dashboard

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every key as a command, then every policy and every colour ramp by name."""
        read_only = bool(self.make_view().read_only_reason)
        for key in self.keys:
            if key.page:
                continue
            name, _, argument = key.action.partition("(")
            if key.action == "command_palette" or (key.control and read_only):
                continue
            method = getattr(self, f"action_{name}")
            call = partial(method, argument.strip("')")) if argument else method
            yield SystemCommand(f"{key.label} ({key.shown})", key.help, call)
        for name in VIEWS:
            yield SystemCommand(
                f"view {name}", "panels on the screen", partial(self.dashboard.set_view, name)
            )
        for name in self.look.ramp_names:
            summary = self.look.theme.ramps[name].summary
            yield SystemCommand(f"ramp {name}", summary, partial(self.set_ramp, name))
        for mode in MODES:
            yield SystemCommand(
                f"colour by {mode.value}", mode.summary, partial(self.set_mode, mode)
            )
        for name in NAMES:
            for depth in DEPTHS:
                call = partial(self.set_theme, name, depth)
                yield SystemCommand(f"theme {name}, {depth}", "colours of the console", call)


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
    """Runs the console until it is left; returns the exit code.

    `theme`: auto, dark, light. `colors`: auto, truecolor, 256, 16. ValueError for anything else.
    `guide`: explains itself step by step, always or until somebody has seen it once.
    """
    look = choose(theme, colors, ascii_only=ascii_only, motion=motion)
    app = ConsoleApp(
        url,
        token=token,
        read_only=read_only,
        fps=fps,
        look=look,
        recording=recording,
        moment=moment,
        keys=keys,
        guided=guide == "always" or (guide == "once" and not seen_path().exists()),
    )
    return app.run() or (app.return_code or 0)
