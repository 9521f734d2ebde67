"""The fleet page: every engine of every server in one table. It opens the dashboard of one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from vtoken_console.changes.controls import applied_text
from vtoken_console.frame.fleet import FleetRow
from vtoken_console.frame.keys import KEYS, ON_FLEET
from vtoken_console.frame.view import View
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.style import palette
from vtoken_console.style.units import change_text
from vtoken_console.widgets.fleet.detail import FleetDetail
from vtoken_console.widgets.fleet.header import FleetHeader
from vtoken_console.widgets.fleet.sentence import FleetSentence
from vtoken_console.widgets.fleet.table import FleetTable
from vtoken_console.widgets.guide_panel import GuidePanel
from vtoken_console.widgets.keybar import KeyBar, fleet_hints
from vtoken_console.widgets.lines import LinesWidget
from vtoken_console.widgets.outcome import problem_text

if TYPE_CHECKING:
    from vtoken.client import AsyncClient


class FleetScreen(Screen[None]):
    AUTO_FOCUS = "#fleet"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(k.keys, k.action, k.label, id=k.id, key_display=k.shown, show=False)
        for k in KEYS
        if k.page == "fleet" or k.id in ON_FLEET
    ]

    class Opened(Message):
        """Requests the dashboard of a row's engine."""

        def __init__(self, row: FleetRow) -> None:
            super().__init__()
            self.row = row

    def __init__(self) -> None:
        super().__init__()
        self.table = FleetTable(id="fleet")
        self._guide = GuidePanel(id="guide")
        self._view: View | None = None  # the newest one

    def compose(self) -> ComposeResult:
        yield FleetHeader(id="header")
        yield FleetSentence(id="fleet-sentence")
        yield self.table
        yield FleetDetail(lambda: self.table.chosen, id="fleet-detail")
        yield self._guide
        yield Input(id="filter", placeholder="part of a name, model, policy or state", compact=True)
        yield KeyBar(fleet_hints, id="keys")

    def on_mount(self) -> None:
        self._guide.display = self.query_one("#filter").display = False

    def show(self, view: View) -> None:
        """Passes the newest view to every widget, the table first: the detail is of its row."""
        self._view = view
        self.table.show(view)
        for widget in self.query(LinesWidget):
            if widget is not self.table:
                widget.show(view)

    # ------------------------------------------------------------ keys

    def action_open_engine(self) -> None:
        if self.table.chosen is not None:
            self.post_message(self.Opened(self.table.chosen))

    def action_sort_engines(self) -> None:
        self.notify(f"Engines sorted by {self.table.next_order()}.")

    def action_sync_engines(self) -> None:
        self._settle(self._sync)

    def action_undo_engine(self) -> None:
        self._settle(self._undo)

    def _settle(self, call: Callable[[AsyncClient], Coroutine[Any, Any, str]]) -> None:
        """Makes one call to the engine whose change the others do not have."""
        view = self._view
        fleet = view.fleet if view is not None else None
        finding = next((f for f in fleet.findings if f.changed), None) if fleet else None
        if view is None or fleet is None or finding is None:
            self.notify("No change is on one engine alone. Nothing was sent.", severity="error")
            return
        if view.read_only_requested:
            self.notify(f"Not done: {view.read_only_reason}. Nothing was sent.", severity="error")
            return
        row = fleet.rows[finding.changed[0]]

        async def work() -> None:
            from vtoken.client import AsyncClient, ProblemError

            try:
                async with AsyncClient(replace(row.server, engine=row.rank)) as rest:
                    self.notify(await call(rest))
            except ProblemError as error:
                self.notify(problem_text(error.problem), severity="error")

        self.run_worker(work(), group="control", exclusive=True)

    async def _sync(self, rest: AsyncClient) -> str:
        planned = await rest.sync(validate_only=True)
        question = [
            (f"All engines of {rest.server.label} get:", palette.BOLD_STYLE),
            (change_text(planned.changes), palette.TEXT_STYLE),
        ]
        screen = ConfirmScreen(question, "a change of all engines", "Sync")
        if not await self.app.push_screen_wait(screen):
            return "Nothing was changed."
        return f"All engines have it: {applied_text(await rest.sync())}"

    async def _undo(self, rest: AsyncClient) -> str:
        return f"Undone: {applied_text(await rest.undo())}"

    def action_filter_engines(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        self.set_focus(box)  # at once, so that the next key is text, not a command

    def on_input_changed(self, event: Input.Changed) -> None:
        self.table.set_filter(event.value)

    def on_input_submitted(self) -> None:
        self._leave_filter()

    def on_key(self, event: events.Key) -> None:
        if event.key != "escape":
            return
        box = self.query_one("#filter", Input)
        if box.display or box.value:
            event.stop()
            box.value = ""
            self._leave_filter()
        else:
            self.app.clear_notifications()

    def _leave_filter(self) -> None:
        self.query_one("#filter").display = False
        self.set_focus(self.table)
