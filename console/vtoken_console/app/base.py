"""What the parts of the application share: state, view of one frame, messages, server calls.

Knows no key and no page. `actions_*.py` add the actions, `app.py` composes them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from textual.driver import Driver

from vtoken_console.app.keys_in_order import KeysInOrder
from vtoken_console.changes.watch import HealthWatch, Watch
from vtoken_console.feed.connection import Connection, State
from vtoken_console.frame.cost import Cost, metered
from vtoken_console.frame.keys import KEYS, Key
from vtoken_console.frame.view import View
from vtoken_console.look.appearance import Appearance
from vtoken_console.screens.dashboard import Dashboard
from vtoken_console.widgets.notice import SHOWN_S, Note, problem_text

if TYPE_CHECKING:
    from vtoken.stream.reducer import StreamState
    from vtoken_console.feed.activity import Activity
    from vtoken_console.feed.source import Source
    from vtoken_console.frame.guide import Guide


class Base(KeysInOrder):
    """`url`: the server. `source` is None until the network has been imported.

    A key that changes the server acts once while it is held: again HELD_S after it last came.
    """

    HELD_S = 0.7  # longer than terminals wait before they repeat a key

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        read_only: bool,
        look: Appearance,
        keys: tuple[Key, ...] = KEYS,
    ) -> None:
        self.cost = Cost()
        super().__init__()
        self.url = url
        self.read_only = read_only
        self.look = look
        self.activity: Activity | None = None
        self.source: Source | None = None
        self.dashboard = Dashboard()
        self.keys = keys
        self.change_watch = Watch()
        self.health_watch = HealthWatch()
        self.guide: Guide | None = None
        self._token = token
        self._ticks: deque[float] = deque(maxlen=64)
        self._last_control = ("", 0.0)  # which came last, and when (monotonic)

    def get_driver_class(self) -> type[Driver]:
        return metered(super().get_driver_class(), self.cost)

    def make_view(self) -> View:
        """The newest state as one value."""
        source, now = self.source, time.monotonic()
        spread = now - self._ticks[0] if self._ticks else 0.0
        synced = source is not None and source.feed.connection.ever_live
        replay = source.replay if source is not None else None
        return View(
            url=self.url,
            connection=source.feed.connection if source else Connection(State.IDLE),
            now=time.time() if replay is None else replay.ts,
            monotonic=now,
            age_s=now - source.feed.received if source and replay is None else 0.0,
            fps=(len(self._ticks) - 1) / spread if spread > 0 else 0.0,
            ramp=self.look.ramp,
            theme=self.look.theme,
            ascii_only=self.look.ascii_only,
            motion=self.look.motion,
            asked_read_only=self.read_only,
            filter=self.dashboard.filter,
            model=source.feed.model if source and synced else None,
            activity=self._observe(source.feed.model, now) if source and synced else None,
            audit=source.feed.picture.audit if source and synced else (),
            series=source.feed.series if source and synced else None,
            cost=self.cost.sample(now),
            keys=self.keys,
            replay=replay,
            guide=self.guide.shown if self.guide is not None else None,
        )

    def _observe(self, model: StreamState, now: float) -> Activity:
        if self.activity is None:
            from vtoken_console.feed.activity import Activity

            self.activity = Activity()
        self.activity.observe(model, now)
        return self.activity

    def tick(self) -> None:
        """Draws one frame."""
        raise NotImplementedError

    def tick_soon(self) -> None:
        """Draws a frame without waiting for the next turn."""
        self.call_later(self.tick)

    def say(self, text: str, *, is_error: bool = False, grave: bool = False) -> None:
        """One message above the keys; an error stays until escape or the next action.

        A grave one came without being asked for, and stays until escape.
        """
        until = None if is_error or grave else time.monotonic() + SHOWN_S
        self.dashboard.say(Note(text, is_error or grave, until, grave))

    def tell_changes(self, view: View) -> None:
        """Says what became of changes, and of the server's parts, since the last frame."""
        if view.model is not None and view.replay is None:
            status = view.model.status
            health = self.health_watch.look(status.health) if status is not None else []
            for told in (*self.change_watch.look(view.model, view.monotonic), *health):
                self.say(told.text, grave=told.grave)

    def refused(self, *, dry_run: bool = False) -> bool:
        """Whether controls are off or the link is down; then says why.

        `dry_run`: whoever may look may do it, on a server.
        """
        view = self.make_view()
        why = view.read_only_reason if view.replay is not None or not dry_run else ""
        if not why and not view.connection.is_live:
            why = "no connection to the server"
        if why:
            self.say(f"Not done: {why}. Nothing was sent.", is_error=True)
        return bool(why)

    def control(self, name: str, make: Callable[[Source], Coroutine[Any, Any, str]]) -> None:
        """Makes one call to the server, unless controls are off, and says what came of it.

        `name` tells a key that is held from another one.
        """
        (last, at), now, source = self._last_control, time.monotonic(), self.source
        self._last_control = (name, now)
        if name == last and now - at < self.HELD_S:
            return
        if self.refused() or source is None:
            return

        async def work() -> None:
            self.change_watch.calls += 1
            try:
                await self._tell(make(source))
            finally:
                self.change_watch.calls -= 1

        self.run_worker(work(), group="control")

    def try_out(self, make: Callable[[Source], Coroutine[Any, Any, str]]) -> None:
        """Makes one call that changes nothing, and says what it answers."""
        if not self.refused(dry_run=True) and self.source is not None:
            self.run_worker(self._tell(make(self.source)), group="try-out")

    async def _tell(self, call: Coroutine[Any, Any, str]) -> None:
        from vtoken.client import ProblemError

        try:
            self.say(await call)
        except ProblemError as error:
            self.say(problem_text(error.problem), is_error=True)
