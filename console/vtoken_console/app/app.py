"""The console application: one worker for the network, one timer for the screen.

A source updates the model; `tick` draws the newest model `fps` times a second, independently of the
server. Keys of the dashboard are actions of `Dashboard`; here is what works on every page.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.console import Console
from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.driver import Driver
from textual.filter import LineFilter
from textual.markup import escape
from textual.notifications import SeverityLevel
from textual.screen import Screen

from vtoken_console.app.fleet_pages import FleetPages
from vtoken_console.app.key_queue import KeyQueue
from vtoken_console.app.keyfile import keymap
from vtoken_console.feed.connection import Connection, State
from vtoken_console.feed.session import Session
from vtoken_console.frame.cost import Cost
from vtoken_console.frame.guide import Facts, Guide, mark_seen, seen_path
from vtoken_console.frame.keys import DASHBOARD_KEYS, GLOBAL, KEYS, Key
from vtoken_console.frame.terminal import Terminal
from vtoken_console.frame.view import View
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.style.appearance import Appearance, choose
from vtoken_console.style.asciify import AsciiFilter
from vtoken_console.style.breakpoints import HEIGHT_CLASSES, WIDTH_CLASSES
from vtoken_console.style.themes import NAMES, SYSTEMS
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.lines import LinesWidget
from vtoken_console.widgets.requests import Requests

if TYPE_CHECKING:
    from textual.worker import WorkType

    from vtoken.client import Server
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.activity import Activity
    from vtoken_console.feed.session import Source
    from vtoken_console.screens.fleet import FleetScreen

SEEK_S = 5.0
SHOWN_S = 12.0  # how long the result of an action is shown
UNTIL_ESCAPE_S = 1e6
GLYPHS: dict[SeverityLevel, str] = {
    "information": "[$vt-good]✓[/]",
    "warning": "[bold $vt-bad]▼[/]",
    "error": "[bold $vt-bad]×[/]",
}


def commands() -> type[Provider]:
    """What the palette finds; imported when it is first opened."""
    from vtoken_console.app.commands import Commands

    return Commands


PAGES = {  # in the guide
    "Dashboard": "",
    "ControlScreen": "settings",
    "RequestScreen": "request",
    "HelpScreen": "help",
}


class ConsoleApp(App[int]):
    """`fps` frames a second at most; `read_only` disables controls whatever the server grants.

    `server`: itself or its URL; of a recording, a name. `recording`: a file to play from `moment`
    on instead of connecting to a server. `guide`: of the first minute; None if it is not `guided`,
    and after its end. `servers`: several, instead of `server`. The fleet page is the start page of
    several servers, and of a server with several engines unless `server` names one. `request`: its
    page is opened at the start; the first characters of the id do.
    """

    TITLE = "vToken"
    CSS_PATH = "console.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {commands}
    HORIZONTAL_BREAKPOINTS = WIDTH_CLASSES
    VERTICAL_BREAKPOINTS = HEIGHT_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(
                k.keys,
                k.action,
                k.label,
                id=k.id,
                key_display=k.shown,
                show=False,
                priority=k.id == "skip-guide",  # works on every page
            )
            for k in DASHBOARD_KEYS
            if k.id in GLOBAL
        ),
        Binding("space", "replay('toggle_pause')", show=False),
        Binding("less_than_sign", "replay('slower')", show=False),
        Binding("greater_than_sign", "replay('faster')", show=False),
        Binding("full_stop", "replay('step')", show=False),
        Binding("left_square_bracket", "replay('back')", show=False),
        Binding("right_square_bracket", "replay('on')", show=False),
    ]

    def __init__(
        self,
        server: Server | str,
        *,
        read_only: bool = False,
        fps: float = 10.0,
        appearance: Appearance | None = None,
        recording: Path | None = None,
        moment: str | None = None,
        keys: tuple[Key, ...] = KEYS,
        guided: bool = False,
        servers: Sequence[Server] = (),
        request: str | None = None,
    ) -> None:
        self.terminal = Terminal()  # Textual calls get_driver_class in its __init__
        super().__init__()
        # `Terminal` reduces the colours to those of the theme, which can change.
        self.console = Console(
            color_system="truecolor", file=self.console.file, force_terminal=True, no_color=False
        )
        self.animation_level = "none"  # every step of an animation is an update of the terminal
        self.cost = Cost()
        self.keys = keys
        self._keys_of_one = tuple(k for k in keys if k.id != "fleet" and k.page != "fleet")
        self.max_fps = fps
        self._servers = tuple(servers)
        self.fleet = FleetPages(self)
        self.session = Session(
            "" if servers else server,
            fps=fps,
            read_only=read_only,
            recording=recording,
            moment=moment,
        )
        self.dashboard = Dashboard(self.session)
        self.appearance = appearance or choose(depth="truecolor")
        self._ascii_filters = [AsciiFilter()] if self.appearance.ascii_only else []
        self._apply_theme()
        self.guide = Guide() if guided else None
        self._request = request  # to be opened
        self.alerts: list[str] = []  # until escape, oldest first
        self._failed = False  # the answer to the newest key that was answered is an error
        self._activity: Activity | None = None
        self._drawn_at = 0.0  # monotonic [s]; 0: no frame was drawn
        self._dimmed_drawn_at = 0.0  # when the dashboard was last drawn behind a page
        self._key_queue = KeyQueue(self, super().on_event)

    @property
    def source(self) -> Source | None:
        """The server or recording on the screen; None until its libraries are imported."""
        return self.session.source

    def get_driver_class(self) -> type[Driver]:
        return self.terminal.driver_class(super().get_driver_class())

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), *self._ascii_filters]

    def get_default_screen(self) -> Screen[Any]:
        return self.dashboard

    def on_mount(self) -> None:
        self.set_keymap(keymap(self.keys))
        self.call_after_refresh(self._start)
        self.call_later(self.tick)

    async def _start(self) -> None:
        if self._servers:
            await self.fleet.begin(self._servers)
        self.tick()
        self.run_worker(self.session.run(), name="network", exit_on_error=True)
        self.set_interval(1 / self.max_fps, self.tick, name="frame")

    # ------------------------------------------------------------ frames

    def tick(self) -> None:
        """Draws one frame, the newest model on every visible screen, if the terminal keeps up."""
        if self.terminal.is_behind:
            return
        now = time.monotonic()
        self._count_frame(now)
        view = self.view()
        self.dashboard.announce(view)
        self._update_guide(view)
        if self.fleet.needs_begin(view):
            begin: WorkType[None] = self.fleet.begin_of_server
            self.run_worker(begin, group="fleet-page", exclusive=True)
        if self._request is not None and view.model is not None:
            wanted, self._request = self._request, None
            self.run_worker(self.dashboard.open_request(wanted), group="request")
        # Behind a dialog, a page is dimmed and drawn in full: once a second is enough.
        draw_dimmed = now - self._dimmed_drawn_at >= 1.0
        if draw_dimmed:
            self._dimmed_drawn_at = now
        behind = next((s for s in reversed(self.screen_stack) if not s.is_modal), None)
        for screen in self.screen_stack:
            drawn = screen is self.screen or (draw_dimmed and screen is behind)
            if drawn and screen.is_mounted:
                _show(screen, view)

    def _count_frame(self, now: float) -> None:
        """Counts a frame drawn at monotonic time `now` [s], and those dropped before it."""
        cost = self.cost
        if self._drawn_at:
            cost.dropped += max(0, round((now - self._drawn_at) * self.max_fps) - 1)
        cost.drawn += 1
        cost.written_bytes = self.terminal.written_bytes
        cost.received_bytes = self.fleet.received_bytes
        if self.source is not None:
            cost.received_bytes += self.source.feed.received_bytes
        self._drawn_at = now

    def view(self) -> View:
        """The newest state as one value."""
        source, now, fleet = self.source, time.monotonic(), self.fleet.view()
        server = self.session.server
        feed = source.feed if source is not None else None
        filled = feed if feed is not None and feed.connection.ever_live else None
        replay = source.replay if source is not None else None
        return View(
            url=self.session.url,
            server_name=server.name if server is not None else "",
            connection=feed.connection if feed else Connection(State.IDLE),
            now=time.time() if replay is None else replay.ts,
            monotonic=now,
            age_s=now - feed.received if feed and replay is None else 0.0,
            ramp=self.appearance.ramp,
            theme=self.appearance.theme,
            ascii_only=self.appearance.ascii_only,
            motion=self.appearance.motion,
            read_only_requested=self.session.read_only,
            filter=self.dashboard.filter,
            model=filled.model if filled else None,
            activity=self._observe(filled.model, now) if filled else None,
            series=filled.data.series if filled else None,
            audit=filled.data.audit if filled else (),
            cost=self.cost.sample(now),
            keys=self.keys if fleet is not None else self._keys_of_one,
            replay=replay,
            fleet=fleet,
            guide=self.guide.shown if self.guide is not None else None,
        )

    def _observe(self, model: StreamState, now: float) -> Activity:
        if self._activity is None:
            from vtoken_console.feed.activity import Activity

            self._activity = Activity()
        self._activity.observe(model, now)
        return self._activity

    def on_dashboard_frame_requested(self) -> None:
        self.tick()

    # ------------------------------------------------------------ events

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
        await self.dashboard.zoom_step(slots=event.slots)

    # ------------------------------------------------------------ messages

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Shows a message above the keys, in place of the one before.

        An error stays until escape or the next message. An alert (a warning), which no key has
        caused, stays until escape.
        """
        if severity == "warning":
            self.alerts.append(message)
        else:
            self._clear_answer()
            self._failed = severity == "error"
        self._toast(message, severity)

    def _clear_answer(self) -> None:
        """Removes what an earlier key was answered; alerts stay."""
        self._clear_toasts()
        for alert in self.alerts:
            self._toast(alert, "warning")

    def _toast(self, text: str, severity: SeverityLevel) -> None:
        text = f"{GLYPHS[severity]} {escape(text)}{'  esc: seen' * (severity == 'warning')}"
        super().notify(
            text,
            severity=severity,
            timeout=SHOWN_S if severity == "information" else UNTIL_ESCAPE_S,
        )

    def clear_notifications(self) -> None:
        self.alerts.clear()
        self._failed = False
        self._clear_toasts()

    def _clear_toasts(self) -> None:
        """Removes all messages with what holds them, which Textual would leave, a line each."""
        for screen in self.screen_stack:
            screen.query("ToastRack > *").remove()
        super().clear_notifications()

    # ------------------------------------------------------------ colours

    def action_theme(self) -> None:
        at = NAMES.index(self.appearance.theme.name)
        self.set_theme(NAMES[(at + 1) % len(NAMES)], self.appearance.theme.depth)

    def set_theme(self, name: str, depth: str) -> None:
        self.appearance = self.appearance.with_theme(name, depth)
        self._apply_theme()
        self.notify(
            f"Theme: {name}, {depth} colours." if depth != "truecolor" else f"Theme: {name}."
        )
        self.tick()

    def _apply_theme(self) -> None:
        """Sets Textual's theme and the number of colours sent to the terminal."""
        theme = self.appearance.theme
        self.register_theme(theme.for_textual())
        self.theme = theme.full_name
        self.terminal.set_colors(SYSTEMS[theme.depth])

    # ------------------------------------------------------------ the guided first minute

    def _update_guide(self, view: View) -> None:
        """Passes what the user did to the guide, and ends it after its last step."""
        if self.guide is None:
            return
        if self.fleet.is_shown:
            self.guide.update(Facts(page="fleet"))
            return
        tables = self.dashboard.query(Requests)
        if view.model is None or not tables:
            return  # nothing is drawn yet, or no more
        page, requests, own = type(self.screen).__name__, tables.first(), self.dashboard.own_changes
        self.guide.update(
            Facts(
                page=PAGES.get(page, page),
                picked=requests.picked,
                order=requests.order,
                edited=bool(getattr(self.screen, "patch", None)),
                trials=own.num_trials,
                changes=own.num_changes,
                can_change=not view.read_only_reason,
            )
        )
        if self.guide.finished:
            self._end_guide("That was the guide. `vtoken demo --guide` shows it again.")

    def action_skip_guide(self) -> None:
        if self.guide is None:
            self.notify("No guide is running; `vtoken console --guide` starts one.")
        else:
            self._end_guide("Guide skipped. `vtoken demo --guide` shows it again.")

    def _end_guide(self, text: str) -> None:
        self.guide = None
        error = mark_seen(seen_path())
        if error:
            self.notify(f"{text} But {error}.", severity="error")
        else:
            self.notify(text)

    # ------------------------------------------------------------ several engines

    @property
    def is_ready(self) -> bool:
        """Whether the start page has its data."""
        if self.fleet.is_shown:
            return self.fleet.settled
        ready = self.source is not None and self.source.ready
        return ready and not self.fleet.needs_begin(self.view())

    async def action_fleet(self) -> None:
        await self.fleet.toggle()

    def on_fleet_screen_opened(self, message: FleetScreen.Opened) -> None:
        self.fleet.open(message.row)

    def forget_engine(self) -> None:
        """Another engine is on the dashboard: what was seen of the one before is not of it."""
        self._activity = None
        self.dashboard.forget()

    # ------------------------------------------------------------ replay

    def action_replay(self, what: str) -> None:
        """One of the controls of a replay, by name. On live servers, "back" and "on" are the
        engines beside the one on the screen.
        """
        replay = self.session.replay
        if replay is None:
            if what in ("back", "on"):
                self.fleet.step(1 if what == "on" else -1)
            return
        match what:
            case "toggle_pause":
                replay.toggle_pause()
            case "slower" | "faster":
                replay.faster(1 if what == "faster" else -1)
            case "step":
                replay.step()
            case "back" | "on":
                replay.seek_by(SEEK_S if what == "on" else -SEEK_S)
            case "start" | "end":
                replay.seek(replay.index.last_ts if what == "end" else replay.index.first_ts)

    # ------------------------------------------------------------ export

    async def action_export(self) -> None:
        from vtoken_console.screens.export import ExportScreen

        model = self.session.model
        if not self.fleet.is_shown and (model is None or not model.synced):
            self.notify("Nothing to export yet: no data.", severity="error")
        elif not isinstance(self.screen, ExportScreen):
            await self.push_screen(ExportScreen(), self._on_export_choice)

    def _on_export_choice(self, kind: str | None) -> None:
        if kind is not None:
            # After the refresh, the screen is drawn without the dialog.
            self.call_after_refresh(self._export, kind)

    async def _export(self, kind: str) -> None:
        from vtoken_console.export.raster import PngUnavailable

        try:
            self.notify(f"Exported {await self._hand_over(await self.export_files(kind))}.")
        except PngUnavailable as reason:
            self.notify(f"No PNG: {reason}. SVG needs nothing.", severity="error")
        except OSError as error:
            self.notify(f"Not exported: {error}.", severity="error")

    async def export_files(self, kind: str) -> dict[str, bytes]:
        """What the screen shows, as contents by file name. Raises PngUnavailable."""
        from vtoken_console.export import files
        from vtoken_console.export.dots import with_dots
        from vtoken_console.export.raster import svg_to_png

        source, url = self.source, self.session.url or "fleet"
        view = self.view()
        stem = files.stem(view.now)
        if view.fleet is not None and self.fleet.is_shown:
            rows = [
                files.ExportedRow(r.name, r.server.url, r.condition, r.tokens_per_s, r.engine)
                for r in view.fleet.rows
            ]
            if kind == "json":
                sentences = [finding.text for finding in view.fleet.findings]
                return {f"{stem}.json": files.fleet_document(rows, sentences, view.now)}
            if kind == "csv":
                return {f"{stem}-engines.csv": files.fleet_table(rows)}
        elif source is not None and kind in ("json", "csv"):
            return await self._export_data(kind, source, view)
        svg = with_dots(self.export_screenshot(title=f"vtoken console: {url}"))
        if kind == "svg":
            return {f"{stem}.svg": svg.encode()}
        return {f"{stem}.png": await asyncio.to_thread(svg_to_png, svg)}

    async def _export_data(self, kind: str, source: Source, view: View) -> dict[str, bytes]:
        from vtoken_console.export import files

        stem, model, url = files.stem(view.now), source.feed.model, self.session.url
        if kind == "json":
            ts = model.status.ts if model.status else view.now
            return {f"{stem}.json": await asyncio.to_thread(files.document, model, url, ts)}
        tables = await asyncio.to_thread(files.tables, model, source.feed.data.series)
        return {f"{stem}-{name}.csv": data for name, data in tables.items()}

    async def _hand_over(self, contents: dict[str, bytes]) -> str:
        """Writes the files, or sends them to the browser; returns where. Raises OSError."""
        from vtoken_console.export import files

        if self.is_web:  # the browser may be on another machine
            for name, data in contents.items():
                self.deliver_binary(io.BytesIO(data), save_filename=name)
            return f"{', '.join(contents)} to the browser"
        paths = await asyncio.to_thread(files.write, Path.cwd(), contents)
        if len(paths) == 1:
            return str(paths[0])
        return f"{', '.join(path.name for path in paths)} in {paths[0].parent}"

    # ------------------------------------------------------------ other actions

    def action_retry(self) -> None:
        if self.source is not None:
            self.source.retry_now()
        self.fleet.retry_now()

    async def action_help(self) -> None:
        from vtoken_console.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            if not self._failed:
                self._clear_answer()
            await self.push_screen(HelpScreen())

    async def action_quit(self) -> None:
        self.exit(0)


def _show(screen: Screen[Any], view: View) -> None:
    """Passes the view to a screen's own `show`, else to every panel of the screen."""
    show = getattr(screen, "show", None)
    if show is not None:
        show(view)
        return
    for panel in screen.query(LinesWidget):
        panel.show(view)


def run(
    server: Server | str,
    *,
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
    servers: Sequence[Server] = (),
    request: str | None = None,
) -> int:
    """Runs the console until the user quits; returns the exit code.

    `theme`: auto, dark, light. `colors`: auto, truecolor, 256, 16. ValueError for anything else.
    `guide`: show the guided first minute always, or once per user. `servers`: several, instead of
    `server`. `request`: whose page is opened at the start.
    """
    appearance = choose(theme, colors, ascii_only=ascii_only, motion=motion)
    app = ConsoleApp(
        server,
        read_only=read_only,
        fps=fps,
        appearance=appearance,
        recording=recording,
        moment=moment,
        keys=keys,
        guided=guide == "always" or (guide == "once" and not seen_path().exists()),
        servers=servers,
        request=request,
    )
    return app.run() or (app.return_code or 0)
