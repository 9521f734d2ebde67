"""The keys that change the server, or say what would: pause, compact, undo, keep, settings.

Knows the wire through `changes.controls` only, which is imported when first needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from textual.app import App

from vtoken_console.app.frames import Frames
from vtoken_console.app.session import Session
from vtoken_console.changes.watch import HealthWatch, Watch
from vtoken_console.frame.view import View
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.widgets.notice import problem_text

if TYPE_CHECKING:
    from vtoken.client import AsyncClient

Call = Callable[["AsyncClient"], Coroutine[Any, Any, str]]


class Controls:
    """Every outcome is said on the dashboard.

    A key that changes the server acts once while it is held: again HELD_S after it last came.
    """

    HELD_S = 0.7  # longer than terminals wait before they repeat a key

    def __init__(
        self, app: App[int], session: Session, frames: Frames, dashboard: Dashboard
    ) -> None:
        self._app = app
        self._session = session
        self._frames = frames
        self._dashboard = dashboard
        self._changes = Watch()
        self._health = HealthWatch()
        self._last_key = ("", 0.0)  # which came last, and when (monotonic)

    # ------------------------------------------------------------ keys

    def pause(self) -> None:
        from vtoken_console.changes import controls

        model = self._session.model
        status = model.status if model is not None else None
        state = status.reclamation.state if status else "auto"
        self._change("pause", lambda rest: controls.toggle_pause(rest, state, self._changes))

    def compact(self) -> None:
        from vtoken_console.changes import controls

        self._change("compact", controls.compact)

    def compact_dry(self) -> None:
        from vtoken_console.changes import controls

        self._try_out(lambda rest: controls.compact(rest, dry_run=True))

    def undo(self) -> None:
        from vtoken_console.changes import controls

        self._change("undo", lambda rest: controls.undo(rest, self._changes))

    def undo_dry(self) -> None:
        from vtoken_console.changes import controls

        self._try_out(controls.undo_dry)

    def confirm(self) -> None:
        from vtoken_console.changes import controls

        self._change("confirm", controls.confirm)

    async def open_settings(self, field: str) -> None:
        """The page of all settings, at `field`."""
        from vtoken_console.screens.control import ControlScreen

        source = self._session.source
        if not self._refused(dry_run=True) and source is not None:
            why = self._frames.view().read_only_reason
            await self._app.push_screen(ControlScreen(source, self._changes, field, why))

    # ------------------------------------------------------------ outcomes

    def tell(self, view: View) -> None:
        """Says what became of changes, and of the server's parts, since the last frame."""
        if view.model is not None and view.replay is None:
            status = view.model.status
            health = self._health.look(status.health) if status is not None else []
            for told in (*self._changes.look(view.model, view.monotonic), *health):
                self._dashboard.say(told.text, grave=told.grave)

    def _refused(self, *, dry_run: bool = False) -> bool:
        """Whether controls are off or the link is down; then says why.

        `dry_run`: whoever may look may do it, on a server.
        """
        view = self._frames.view()
        why = view.read_only_reason if view.replay is not None or not dry_run else ""
        if not why and not view.connection.is_live:
            why = "no connection to the server"
        if why:
            self._dashboard.say(f"Not done: {why}. Nothing was sent.", is_error=True)
        return bool(why)

    def _change(self, name: str, call: Call) -> None:
        """Makes one call to the server, unless controls are off, and says what came of it.

        `name` tells a key that is held from another one.
        """
        (last, at), now, source = self._last_key, time.monotonic(), self._session.source
        self._last_key = (name, now)
        if name == last and now - at < self.HELD_S:
            return
        if self._refused() or source is None:
            return
        rest = source.rest

        async def work() -> None:
            self._changes.calls += 1
            try:
                await self._tell(call(rest))
            finally:
                self._changes.calls -= 1

        self._app.run_worker(work(), group="control")

    def _try_out(self, call: Call) -> None:
        """Makes one call that changes nothing, and says what it answers."""
        source = self._session.source
        if not self._refused(dry_run=True) and source is not None:
            self._app.run_worker(self._tell(call(source.rest)), group="try-out")

    async def _tell(self, call: Coroutine[Any, Any, str]) -> None:
        from vtoken.client import ProblemError

        try:
            self._dashboard.say(await call)
        except ProblemError as error:
            self._dashboard.say(problem_text(error.problem), is_error=True)
