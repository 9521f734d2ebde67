"""Builds the View of a frame when the frame is drawn, and counts drawn and dropped frames."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from vtoken_console.app.colours import Colours
from vtoken_console.app.guidance import Guidance
from vtoken_console.app.session import Session
from vtoken_console.feed.connection import Connection, State
from vtoken_console.frame.cost import Cost
from vtoken_console.frame.keys import Key
from vtoken_console.frame.terminal import Terminal
from vtoken_console.frame.view import View
from vtoken_console.screens.dashboard import Dashboard

if TYPE_CHECKING:
    from vtoken.stream.reducer import StreamState
    from vtoken_console.feed.activity import Activity

WINDOW_S = 2.0  # frames a second are the mean over this window


class Frames:
    """`begin` counts a drawn frame; `view` returns the newest state as one value."""

    def __init__(
        self,
        session: Session,
        dashboard: Dashboard,
        colours: Colours,
        guidance: Guidance,
        cost: Cost,
        terminal: Terminal,
        keys: tuple[Key, ...],
        max_fps: float,
    ) -> None:
        self._session = session
        self._dashboard = dashboard
        self._colours = colours
        self._guidance = guidance
        self._cost = cost
        self._terminal = terminal
        self._keys = keys
        self._max_fps = max_fps
        self._activity: Activity | None = None
        self._begun: deque[float] = deque(maxlen=64)  # monotonic [s]

    def begin(self, now: float) -> None:
        """Counts a frame drawn at monotonic time `now` [s], and those dropped before it."""
        cost, begun, source = self._cost, self._begun, self._session.source
        if begun:
            cost.dropped += max(0, round((now - begun[-1]) * self._max_fps) - 1)
        cost.drawn += 1
        cost.written_bytes = self._terminal.written_bytes
        if source is not None:
            cost.received_bytes = source.feed.received_bytes
        begun.append(now)
        while now - begun[0] > WINDOW_S:
            begun.popleft()

    def view(self) -> View:
        source, now = self._session.source, time.monotonic()
        appearance = self._colours.appearance
        spread = now - self._begun[0] if self._begun else 0.0
        feed = source.feed if source is not None else None
        filled = feed if feed is not None and feed.connection.ever_live else None
        replay = source.replay if source is not None else None
        guide = self._guidance.guide
        return View(
            url=self._session.url,
            connection=feed.connection if feed else Connection(State.IDLE),
            now=time.time() if replay is None else replay.ts,
            monotonic=now,
            age_s=now - feed.received if feed and replay is None else 0.0,
            fps=(len(self._begun) - 1) / spread if spread > 0 else 0.0,
            ramp=appearance.ramp,
            theme=appearance.theme,
            ascii_only=appearance.ascii_only,
            motion=appearance.motion,
            read_only_requested=self._session.read_only,
            filter=self._dashboard.filter,
            model=filled.model if filled else None,
            activity=self._observe(filled.model, now) if filled else None,
            series=filled.series if filled else None,
            audit=filled.data.audit if filled else (),
            cost=self._cost.sample(now),
            keys=self._keys,
            replay=replay,
            guide_step=guide.number if guide is not None else None,
        )

    def _observe(self, model: StreamState, now: float) -> Activity:
        if self._activity is None:
            from vtoken_console.feed.activity import Activity

            self._activity = Activity()
        self._activity.observe(model, now)
        return self._activity
