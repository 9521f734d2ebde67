"""One client of the stream: builds its messages and sends them at the client's pace.

The order is hello, snapshot, missed events after a resume, then events before the delta of the same
time. `seq` rises by one with every message.

1. The event queue holds at most MAX_QUEUED. When it overflows, events of the frequent kinds are
   dropped; if too many remain, all are. A `dropped` message with the count follows, then a fresh
   snapshot.
2. State is never queued: a delta is computed on sending, against the state last sent.
3. A send that takes longer than SEND_TIMEOUT_S ends the stream (TimeoutError).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vtoken import wire
from vtoken.wire.engine_state import EngineState
from vtoken_api.fanout.cursor import STATE_TOPICS, StateCursor
from vtoken_api.fanout.hub import Hub
from vtoken_api.problems import refuse

MAX_QUEUED = 2000
SEND_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """The parsed query of the stream's URL."""

    topics: frozenset[str]
    fps: float
    packed: bool  # msgpack in binary messages; else JSON in text messages
    resume: tuple[str, int] | None  # epoch, seq of the last event seen
    engine: int | None = None  # its rank; None: the server's first


class Subscriber:
    """Runs until the client leaves or the engine stops; `passive`: does not make the hub subscribe
    to state."""

    def __init__(
        self,
        hub: Hub,
        query: StreamQuery,
        send: Callable[[bytes], Awaitable[None]],
        *,
        passive: bool = False,
    ) -> None:
        self._takes_state = bool(query.topics & STATE_TOPICS)
        self.wants_state = self._takes_state and not passive
        self.is_client = not passive
        self._hub = hub
        self._query = query
        self._send_bytes = send
        self._encoder = msgspec.msgpack.Encoder() if query.packed else msgspec.json.Encoder()
        self._cursor = StateCursor(query.topics, packed=query.packed)
        self._wants_events = "events" in query.topics
        self._queue: deque[wire.Event | int] = deque()  # an int: that many events are lost here
        self._wake = asyncio.Event()
        self._describe: wire.Describe
        self._state: EngineState | None = None
        self._history: list[wire.Point] = []  # of the first snapshot
        self._last_event = 0  # `seq` of the last event sent
        self._replayed = 0  # events up to this seq were replayed and are not sent again
        self._seq = 0
        self._resumed = False
        self._sent_at = 0.0

    # ------------------------------------------------------------ called by the hub

    def offer(self, events: list[wire.Event], lost: int) -> None:
        """Queue new events; `lost` earlier ones are no longer available. When the queue overflows,
        drop the frequent kinds.
        """
        if not self._wants_events:
            return
        events = [event for event in events if event.seq > self._replayed]
        self._hub.num_dropped += lost
        if len(self._queue) + len(events) > MAX_QUEUED:
            waiting = [*self._queue, *events]
            unread = [e for e in waiting if not isinstance(e, int)]
            lost_before = sum(e for e in waiting if isinstance(e, int))
            events = [e for e in unread if e.kind not in wire.FREQUENT_KINDS]
            if len(events) > MAX_QUEUED:
                events = []
            dropped = len(unread) - len(events)
            self._hub.num_dropped += dropped
            lost += lost_before + dropped
            self._queue.clear()
        if lost:
            self._queue.append(lost)
        self._queue.extend(events)
        self._wake.set()

    def wake(self) -> None:
        """Wake the sender for a newer state."""
        if self._takes_state:
            self._wake.set()

    @property
    def resume_from(self) -> tuple[str, int] | None:
        """Where another subscriber resumes without a gap; None before the first event."""
        return (self._describe.epoch, self._last_event) if self._last_event else None

    # ------------------------------------------------------------ the life of a stream

    async def prepare(self) -> None:
        """Fetch the first state and the missed events before sending; raises ProblemError."""
        if not self._hub.alive:
            raise refuse(503, "the engine has stopped")
        self._last_event = self._hub.last_event
        self._describe = await self._hub.describe()
        self._state = await self._hub.current()
        if "metrics" in self._query.topics and self.is_client:
            self._history = await self._hub.history()
        resume = self._query.resume
        if resume is not None and self._wants_events and resume[0] == self._describe.epoch:
            missed = await self._hub.events_after(resume[1])
            known = resume[1] <= missed.last_seq
            if known and not missed.lost and len(missed.events) <= MAX_QUEUED:
                came = [e for e in self._queue if isinstance(e, int) or e.seq > missed.last_seq]
                self._queue = deque([*missed.events, *came])
                self._replayed = missed.last_seq
                self._resumed = True

    async def run(
        self,
        *,
        read_only_reason: str = "",
        can_read_text: bool = False,
        engines: Sequence[int] = (),
    ) -> None:
        """Send until cancelled; raises TimeoutError (slow client), ProblemError (no engine)."""
        hello = self._hello(read_only_reason, can_read_text=can_read_text)
        hello.engines = [*engines]
        await self._send(hello)
        await self._send_snapshot()
        loop = asyncio.get_running_loop()
        period = 1.0 / self._query.fps
        next_state = loop.time() + period
        while True:
            self._wake.clear()
            await self._send_events()
            fresh = self._takes_state and self._hub.state is not self._state
            if fresh and loop.time() >= next_state:
                await self._send_delta()
                next_state = max(next_state, loop.time() - period) + period
                fresh = False
            due = self._sent_at + HEARTBEAT_S
            if await self._idle_until(min(due, next_state) if fresh else due):
                continue
            if loop.time() >= due:
                if not self._hub.alive:
                    raise refuse(503, "the engine has stopped")
                await self._send(self._message(wire.Heartbeat))

    async def _idle_until(self, deadline: float) -> bool:
        """Wait for a wake-up until `deadline`; returns whether one came."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    # ------------------------------------------------------------ messages

    async def _send_events(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            if isinstance(event, int):
                await self._send(self._message(wire.Dropped, n=event))
                self._state = await self._hub.current()
                await self._send_snapshot()
            else:
                self._last_event = event.seq  # before `_send`, in which the recorder may stop
                await self._send(self._message(wire.EventMessage, step=event.step, event=event))

    async def _send_snapshot(self) -> None:
        assert self._state is not None
        snapshot = self._message(wire.Snapshot, **self._cursor.snapshot(self._state))
        snapshot.history, self._history = self._history, []
        await self._send(snapshot)

    async def _send_delta(self) -> None:
        self._state = self._hub.state
        assert self._state is not None
        if fields := self._cursor.delta(self._state):
            await self._send(self._message(wire.Delta, **fields))

    def _hello(self, read_only_reason: str, *, can_read_text: bool) -> wire.Hello:
        about = self._describe
        hello: wire.Hello = self._message(
            wire.Hello,
            schema=wire.SCHEMA_VERSION,
            vtoken_version=about.vtoken_version,
            vllm_version=about.vllm_version,
            model=about.model,
            device=about.device,
            geometry=about.geometry,
            policies=about.policies,
            topics=sorted(self._query.topics),
            fps=self._query.fps,
            can_control=not read_only_reason,
            read_only_reason=read_only_reason,
            can_read_text=can_read_text,
            resumed=self._resumed,
            engine=self._hub.rank,
        )
        return hello

    def _message(self, kind: Any, **fields: Any) -> Any:
        """A message with the next `seq`; `ts` is the time of sending."""
        assert self._state is not None
        self._seq += 1
        fields.setdefault("step", self._state.step)
        return kind(epoch=self._describe.epoch, seq=self._seq, ts=time.time(), **fields)

    async def _send(self, message: wire.Message) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._send_bytes(self._encoder.encode(message))
        self._sent_at = asyncio.get_running_loop().time()
