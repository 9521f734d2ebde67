"""The keys that change the server, and their dry runs: pause, compact, undo, keep, settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from textual.app import App

from vtoken_console.app.frames import Frames
from vtoken_console.app.session import Session
from vtoken_console.changes import controls
from vtoken_console.changes.watch import ChangeWatch, HealthWatch
from vtoken_console.frame.view import View
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.widgets.notice import problem_text

if TYPE_CHECKING:
    from vtoken.client import AsyncClient, OutcomeUnknown

Call = Callable[["AsyncClient"], Coroutine[Any, Any, str]]


class Controls:
    """Every outcome is shown on the dashboard.

    A held key acts once. It acts again once HELD_S have passed since its last repeat.
    """

    HELD_S = 0.7  # longer than a terminal's delay before it repeats a key

    def __init__(
        self, app: App[int], session: Session, frames: Frames, dashboard: Dashboard
    ) -> None:
        self._app = app
        self._session = session
        self._frames = frames
        self._dashboard = dashboard
        self._changes = ChangeWatch()
        self._health = HealthWatch()
        self._last_key = ("", 0.0)  # the newest key's name and monotonic time
        session.on_lookup = self._tell_lookup

    # ------------------------------------------------------------ keys

    def pause(self) -> None:
        model = self._session.model
        status = model.status if model is not None else None
        state = status.reclamation.state if status else "auto"
        self._change("pause", lambda rest: controls.toggle_pause(rest, state, self._changes))

    def compact(self) -> None:
        self._change("compact", controls.compact)

    def compact_dry(self) -> None:
        self._dry_run(lambda rest: controls.compact(rest, dry_run=True))

    def undo(self) -> None:
        self._change("undo", lambda rest: controls.undo(rest, self._changes))

    def undo_dry(self) -> None:
        self._dry_run(controls.undo_dry)

    def confirm(self) -> None:
        self._change("confirm", controls.confirm)

    async def open_settings(self, field: str) -> None:
        """Opens the settings page with the cursor on `field`."""
        from vtoken_console.screens.control import ControlScreen

        source = self._session.source
        if not self._refused(dry_run=True) and source is not None:
            reason = self._frames.view().read_only_reason
            await self._app.push_screen(ControlScreen(source, self._changes, field, reason))

    # ------------------------------------------------------------ outcomes

    def announce(self, view: View) -> None:
        """Shows new alerts about changes and about the health of the server's parts."""
        if view.model is not None and view.replay is None:
            status = view.model.status
            health = self._health.poll(status.health) if status is not None else []
            for alert in (*self._changes.poll(view.model, view.monotonic), *health):
                self._dashboard.show_message(alert.text, sticky=alert.sticky)

    def _tell_lookup(self, lost: OutcomeUnknown) -> None:
        """Shows that the outcome of a change is unknown and is looked up."""
        from vtoken_console.screens.control import ControlScreen

        text = f"{lost.problem.detail}. Looking it up …"
        self._dashboard.show_message(text, is_error=True)
        if isinstance(self._app.screen, ControlScreen):
            self._app.screen.show_lookup(text)

    def _refused(self, *, dry_run: bool = False) -> bool:
        """Whether controls are off or the connection is down; if so, shows the reason.

        `dry_run`: allowed on a read-only connection to a server, but not in a replay.
        """
        view = self._frames.view()
        reason = view.read_only_reason if view.replay is not None or not dry_run else ""
        if not reason and not view.connection.is_live:
            reason = "no connection to the server"
        if reason:
            self._dashboard.show_message(f"Not done: {reason}. Nothing was sent.", is_error=True)
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

        self._app.run_worker(work(), group="control")

    def _dry_run(self, call: Call) -> None:
        """Makes one call that changes nothing, and shows its result."""
        source = self._session.source
        if not self._refused(dry_run=True) and source is not None:
            self._app.run_worker(self._show_result(call(source.rest)), group="dry-run")

    async def _show_result(self, call: Coroutine[Any, Any, str]) -> None:
        from vtoken.client import ProblemError

        try:
            self._dashboard.show_message(await call)
        except ProblemError as error:
            self._dashboard.show_message(problem_text(error.problem), is_error=True)
