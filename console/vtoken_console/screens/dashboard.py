"""The main screen: header, sentence, gauge, the panels that fit, keys, and what the keys do."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from vtoken_console.changes import controls
from vtoken_console.changes.watch import ChangeWatch, HealthWatch
from vtoken_console.feed.session import Session
from vtoken_console.frame.filters import EXAMPLE, NO_FILTER, parse
from vtoken_console.frame.keys import DASHBOARD_KEYS, GLOBAL, PANELS
from vtoken_console.frame.view import View, frozen, still
from vtoken_console.widgets.figures.charts import Charts
from vtoken_console.widgets.figures.figures import Figures
from vtoken_console.widgets.figures.gauge import Gauge
from vtoken_console.widgets.figures.sentence import Sentence
from vtoken_console.widgets.figures.waiting import Waiting
from vtoken_console.widgets.guide_panel import GuidePanel
from vtoken_console.widgets.header import Header
from vtoken_console.widgets.heatmap.colouring import MODES, Mode
from vtoken_console.widgets.heatmap.heatmap import Heatmap
from vtoken_console.widgets.keybar import KeyBar, dashboard_hints
from vtoken_console.widgets.lines import LinesWidget
from vtoken_console.widgets.log import Log
from vtoken_console.widgets.outcome import problem_text
from vtoken_console.widgets.replay_bar import ReplayBar
from vtoken_console.widgets.requests import Requests
from vtoken_console.widgets.trial_bar import TrialBar

if TYPE_CHECKING:
    from vtoken import wire
    from vtoken.client import AsyncClient, OutcomeUnknown

IGNORED_TOKEN = "The server has no tokens; it did not check yours."
Call = Callable[["AsyncClient"], Coroutine[Any, Any, str]]


class Dashboard(Screen[None]):
    """Pages above it are imported when they are first opened.

    A held key that changes the server acts once. It acts again once HELD_S have passed since its
    last repeat.
    """

    AUTO_FOCUS = "#requests"
    HELD_S = 0.7  # longer than a terminal's delay before it repeats a key
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(k.keys, k.action, k.label, id=k.id, key_display=k.shown, show=False)
        for k in DASHBOARD_KEYS
        if k.id not in GLOBAL
    ]

    class FrameRequested(Message):
        """Requests a frame at once, to show a choice of the viewer."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.view: View | None = None  # the newest one
        self.filter = NO_FILTER
        self.frozen: View | None = None  # the picture that stands still
        self._focus_before: Widget | None = None
        self.shown = ""  # the panel that is shown alone
        self.synced = False
        self.heatmap = Heatmap(id="pool")
        self._trial_bar = TrialBar(id="trial-bar")
        self._guide = GuidePanel(id="guide")
        self._changes = ChangeWatch()
        self._health = HealthWatch()
        self._told_token = False  # that the server did not check the token
        self._last_key = ("", 0.0)  # of those that change the server: name and monotonic time
        session.on_lookup = self._tell_lookup

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield Sentence(id="sentence")
        yield Gauge(id="gauge")
        yield self._trial_bar
        yield Waiting(id="waiting")
        with Container(id="panels"):
            with Container(id="top"):
                yield Requests(id="requests")
                with Container(id="right"):
                    yield self.heatmap
                    yield Log(id="log")
            yield Charts(id="charts")
            yield Figures(id="numbers")
        yield self._guide
        yield Input(id="filter", placeholder=EXAMPLE, compact=True)
        yield ReplayBar(self._session, id="replay")
        yield KeyBar(dashboard_hints, id="keys")

    def on_mount(self) -> None:
        self._trial_bar.display = self._guide.display = False
        self.query_one("#filter").display = False

    def show(self, view: View) -> None:
        """Passes the newest view to every visible widget."""
        synced = view.model is not None
        self.set_class(view.replay is not None, "-replay")
        if synced != self.synced:
            self.synced = synced
            self.set_class(synced, "-synced")
            if synced and self.focused is None:
                self.query_one(Requests).focus()
        if self.frozen is not None:
            view = frozen(self.frozen, view)
        self._trial_bar.show(view)  # these two set their own `display`
        self._guide.show(view)
        for widget in self.query(LinesWidget):
            if widget.is_on_screen or widget.view is None:
                widget.show(view)

    def announce(self, view: View) -> None:
        """Shows new alerts about changes and about the health of the server's parts."""
        self.view = view
        if view.model is not None and view.replay is None:
            status = view.model.status
            health = self._health.poll(status.health) if status is not None else []
            for alert in (*self._changes.poll(view.model, view.monotonic), *health):
                self.notify(alert.text, severity="warning" if alert.sticky else "information")
            source = self._session.source
            if source is not None and source.rest.token_ignored and not self._told_token:
                self._told_token = True
                self.notify(IGNORED_TOKEN, severity="warning")

    def forget(self) -> None:
        """Another engine is shown: what was seen of the one before says nothing about it."""
        self._changes, self._health = ChangeWatch(), HealthWatch()
        self._told_token = False

    @property
    def own_changes(self) -> ChangeWatch:
        """What this console changed."""
        return self._changes

    def request_frame(self) -> None:
        self.post_message(self.FrameRequested())

    # ------------------------------------------------------------ changes of the server

    async def action_pause(self) -> None:
        """Asks, then pauses reclamation for all clients of the server, or resumes it."""
        from vtoken_console.screens.confirm import ConfirmScreen

        model, source = self._session.model, self._session.source
        status = model.status if model is not None else None
        if self._refused() or status is None or source is None:
            return
        state = status.reclamation.state
        verb, question = controls.pause_question(status, urlsplit(source.name).netloc)

        def answered(proceed: bool | None) -> None:
            if proceed:
                self._change(
                    "pause", lambda rest: controls.toggle_pause(rest, state, self._changes)
                )

        await self.app.push_screen(ConfirmScreen(question, "for all clients", verb), answered)

    def action_compact(self) -> None:
        self._change("compact", controls.compact)

    def compact_request(self, request_id: str) -> None:
        """Compacts one request."""
        self._change("compact", lambda rest: controls.compact(rest, request_id=request_id))

    def action_compact_dry(self) -> None:
        self._dry_run(lambda rest: controls.compact(rest, dry_run=True))

    def action_restore(self) -> None:
        """Asks, then brings back what the request under the cursor has parked."""
        if request_id := self._under_cursor():
            self.restore_request(request_id)

    def restore_request(self, request_id: str) -> None:
        """Asks with a dry run, then brings back what a request has parked."""
        source = self._session.source
        if self._refused() or source is None:
            return
        asking = self._ask_to_restore(source.rest, request_id, urlsplit(source.name).netloc)
        self.run_worker(asking, group="restore", exclusive=True)

    async def _ask_to_restore(self, rest: AsyncClient, request_id: str, host: str) -> None:
        from vtoken.client import ProblemError
        from vtoken_console.screens.confirm import ConfirmScreen

        try:
            question = await controls.restore_question(rest, request_id, host)
        except ProblemError as error:
            self.notify(problem_text(error.problem), severity="error")
            return
        page = ConfirmScreen(question, "for one request", "Restore")
        if await self.app.push_screen_wait(page):
            self._change("restore", lambda rest: controls.restore(rest, request_id))

    def action_undo(self) -> None:
        self._change("undo", lambda rest: controls.undo(rest, self._changes))

    def action_undo_dry(self) -> None:
        self._dry_run(controls.undo_dry)

    def action_confirm(self) -> None:
        self._change("confirm", lambda rest: controls.confirm(rest, self._changes))

    async def action_settings(self, field: str, proposed: Mapping[str, Any] | None = None) -> None:
        """Opens the settings page at a field, at the floor, or at its first row; `proposed`: a
        patch to begin with.
        """
        from vtoken_console.screens.control import ControlScreen

        source, view = self._session.source, self.view
        if self._refused(dry_run=True) or source is None or view is None:
            return
        if field == "floor":
            config = source.feed.model.config
            by_ratio = config is not None and config.desired.budget_ratio > 0
            field = "budget_ratio" if by_ratio else "budget_tokens"
            proposed = _advised(source.feed.model.status, field)
        page = ControlScreen(source, self._changes, field, view.read_only_reason, proposed)
        await self.app.push_screen(page)

    def _refused(self, *, dry_run: bool = False) -> bool:
        """Whether controls are off or the connection is down; if so, shows the reason.

        `dry_run`: allowed on a read-only connection to a server, but not in a replay.
        """
        view, reason = self.view, ""
        if view is not None and (view.replay is not None or not dry_run):
            reason = view.read_only_reason
        if not reason and (view is None or not view.connection.is_live):
            reason = "no connection to the server"
        if reason:
            self.notify(f"Not done: {reason}. Nothing was sent.", severity="error")
        return bool(reason)

    def _change(self, name: str, call: Call) -> None:
        """Makes one call to the server, unless controls are off, and shows its result.

        `name` identifies the key, so that a held key acts once.
        """
        (last, at), now, source = self._last_key, time.monotonic(), self._session.source
        self._last_key = (name, now)
        if name == last and now - at < self.HELD_S:
            return
        if self._refused() or source is None:
            return
        rest = source.rest

        async def work() -> None:
            self._changes.calls_in_flight += 1
            try:
                await self._show_result(call(rest))
            finally:
                self._changes.calls_in_flight -= 1

        self.run_worker(work(), group="control")

    def _dry_run(self, call: Call) -> None:
        """Makes one call that changes nothing, and shows its result."""
        source = self._session.source
        if not self._refused(dry_run=True) and source is not None:
            self.run_worker(self._show_result(call(source.rest)), group="dry-run")

    async def _show_result(self, call: Coroutine[Any, Any, str]) -> None:
        from vtoken.client import ProblemError

        try:
            self.notify(await call)
        except ProblemError as error:
            self.notify(problem_text(error.problem), severity="error")

    def _tell_lookup(self, lost: OutcomeUnknown) -> None:
        """Shows that the outcome of a change is unknown and is looked up."""
        from vtoken_console.screens.control import ControlScreen

        text = f"{lost.problem.detail}. Looking it up …"
        self.notify(text, severity="error")
        if isinstance(self.app.screen, ControlScreen):
            self.app.screen.show_lookup(text)

    # ------------------------------------------------------------ pages

    async def action_zoom_in(self) -> None:
        """The map alone, then its levels one by one, then the page of the cursor's block."""
        if self.shown != "pool":
            self.show_panel("pool")
        else:
            await self.zoom_step(slots=True)

    def action_zoom_out(self) -> None:
        if not self.heatmap.zoom_out():
            self.show_panel("")

    async def zoom_step(self, *, slots: bool) -> None:
        """Zooms in one level. The level after the last is a block's page, if `slots`."""
        if not self.heatmap.zoom_in() and slots:
            await self.open_block(self.heatmap.cursor)

    async def action_open(self) -> None:
        """Opens the item under the focused panel's cursor, else the request under the table's."""
        if isinstance(self.focused, Heatmap):
            await self.action_zoom_in()
        elif request_id := self._under_cursor():
            await self.open_request(request_id)

    def _under_cursor(self) -> str:
        """The request under the log's cursor if it has the focus, else under the table's; or ""."""
        if isinstance(self.focused, Log):
            return self.focused.request_id
        row = self.query_one(Requests).chosen
        return row.id if row is not None else ""

    async def open_request(self, request_id: str, *, in_place: bool = False) -> None:
        """Opens a request's page. `in_place`: replaces the top page."""
        from vtoken_console.screens.request import RequestScreen

        source = self._session.source
        if source is None:
            return
        page = RequestScreen(
            source, request_id, self.open_block, self.compact_request, self.restore_request
        )
        if in_place:
            await self.app.switch_screen(page)
        else:
            await self.app.push_screen(page)

    async def open_block(self, block_id: int) -> None:
        from vtoken_console.screens.block import BlockScreen

        source = self._session.source
        if source is not None and source.feed.model.synced:
            await self.app.push_screen(BlockScreen(source, block_id, self._open_owner))

    async def _open_owner(self, request_id: str) -> None:
        await self.open_request(request_id, in_place=True)

    # ------------------------------------------------------------ panels

    def show_panel(self, name: str) -> None:
        """Shows one of PANELS alone; "": all panels."""
        target = self.query_one(f"#{name or 'requests'}")
        self.set_focus(target)  # first, since a panel that is hidden passes the focus on
        for other in PANELS:
            self.set_class(other == name, f"-only-{other}")
        self.set_class(bool(name), "-alone")
        self.shown = name
        self.call_after_refresh(self.set_focus, target)  # one that was hidden until now
        self.request_frame()

    def action_panel(self, name: str) -> None:
        """Shows a panel alone, or all again."""
        self.show_panel("" if name == self.shown else name)

    def action_freeze(self) -> None:
        """The picture stands still, or goes on; so does a recording."""
        if self._session.replay is not None:
            self._session.replay.toggle_pause()
        elif self.frozen is not None:
            self.frozen = None
        elif self.view is not None and self.view.model is not None:
            self.frozen = still(self.view)
        self.request_frame()

    def action_sort(self) -> None:
        self.notify(f"Requests by {self.query_one(Requests).next_order()}.")

    def action_mode(self) -> None:
        self.set_mode(MODES[(MODES.index(self.heatmap.mode) + 1) % len(MODES)])

    def set_mode(self, mode: Mode) -> None:
        """Sets the quantity that the heatmap's colours show."""
        self.heatmap.set_mode(mode)
        self.query_one(Requests).lettered = mode is Mode.OWNER
        model = self._session.model
        if mode is Mode.OWNER and model is not None and not len(model.owner):
            self.notify("This server does not report block owners.", severity="error")
        else:
            self.notify(f"Map by {mode.value}: {mode.summary}.")

    # ------------------------------------------------------------ filter

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        if self.focused is not box:
            self._focus_before = self.focused
        box.display = True
        self.app.clear_notifications()  # they would cover it
        self.set_focus(box)  # at once, so that the next key is text, not a command

    def on_input_changed(self, event: Input.Changed) -> None:
        self.filter = parse(event.value)
        self.query_one("#filter").set_class(bool(self.filter.problem), "-wrong")
        self.request_frame()

    def on_input_submitted(self) -> None:
        self.query_one("#filter").display = False
        self.set_focus(self._focus_before)

    def on_key(self, event: events.Key) -> None:
        if self._session.replay is not None and (event.character or "").isdigit():
            event.prevent_default()  # in a recording digits are a moment, not panels
            self.query_one(ReplayBar).begin(event)
            return
        if event.key != "escape":
            return
        box = self.query_one("#filter", Input)
        if box.display or box.value:
            event.stop()
            box.value = ""
            box.display = False
            self.set_focus(self._focus_before)
        elif self.shown:
            self.show_panel("")
        else:
            self.app.clear_notifications()


def _advised(status: wire.Status | None, field: str) -> dict[str, Any]:
    """The change that the adviser proposes, with this field; empty if it proposes none."""
    advice = status.advice if status is not None else []
    return next((each.change for each in advice if field in each.change), {})
