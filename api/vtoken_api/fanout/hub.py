"""A hub: fans the newest frame and the events of one engine out to any number of clients.

1. A frame is decoded once for all clients; each client reads the newest state at its own pace.
2. Every client gets the events in order. The hub fills a gap in their `seq` from the engine, or
   reports the number of lost events.
3. The hub never waits for a client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vtoken import wire
from vtoken.wire import commands
from vtoken.wire.engine_state import Difference, EngineState
from vtoken_api.bus import EngineBus
from vtoken_api.fanout.telemetry import TelemetryReader
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError

FRESH_S = 1.0  # a state older than this is fetched again
MIN_REFRESH_S = 0.1
RETRY_S = 1.0
EVENT_PAGE = 1000


class Listener(Protocol):
    """A client of the hub."""

    wants_state: bool
    is_client: bool  # False: internal to this process

    def offer(self, events: list[wire.Event], lost: int) -> None:
        """Queue new events; `lost` earlier ones are no longer available. Must not block."""

    def wake(self) -> None:
        """Notify the client of a newer state."""


@dataclass(frozen=True, slots=True)
class MissedEvents:
    """Events that the engine still holds, the number that it dropped, and its newest `seq`."""

    events: list[wire.Event]
    lost: int
    last_seq: int


class Hub:
    """One per engine and API server process; `run` follows the engine.

    `complete` adds the fields of this process to every new status.
    """

    def __init__(self, bus: EngineBus) -> None:
        self._bus = bus
        self.rank = bus.rank
        self.state: EngineState | None = None  # the newest; None before the first frame
        self.last_event = 0  # `seq` of the newest one that was passed on
        self.complete: Callable[[wire.Status], None] = lambda _: None
        self.num_dropped = 0  # events missed, summed over clients, cumulative
        self._listeners: set[Listener] = set()
        self._told: list[tuple[wire.EventKind, Callable[[wire.Event], None]]] = []
        self._reader: TelemetryReader | None = None
        self._describe: wire.Describe | None = None
        self._state_at = 0.0
        self._refresh = asyncio.Lock()

    async def run(self) -> None:
        """Follow the engine until cancelled; clients keep their connections."""
        while True:
            try:
                await self._follow()
            except ProblemError as error:
                logger.warning("vtoken: the engine does not answer; retrying: %s", error)
            except Exception:
                logger.exception("vtoken: the telemetry reader failed; restarting it")
            await asyncio.sleep(RETRY_S)

    @property
    def num_clients(self) -> int:
        return sum(listener.is_client for listener in self._listeners)

    @property
    def alive(self) -> bool:
        """False once the engine is dead."""
        return self._bus.alive

    @property
    def state_age_s(self) -> float | None:
        """The age of the newest state; None before the first frame."""
        return None if self.state is None else self._age()

    async def describe(self) -> wire.Describe:
        """The engine's description, fetched once; raises ProblemError."""
        if self._describe is None:
            self._describe = await self._bus.ask(commands.Describe(), wire.Describe)
        return self._describe

    async def current(self) -> EngineState:
        """A state no older than FRESH_S, fetched if necessary; raises ProblemError."""
        async with self._refresh:
            before = self.state
            if before is None or self._age() >= FRESH_S:
                frame = await self._bus.ask(commands.Frame(), wire.Frame)
                if self.state is before:  # otherwise a published frame has superseded it
                    self._take(frame)
            assert self.state is not None
            return self.state

    async def history(self) -> list[wire.Point]:
        """What charts need of the last minutes; raises ProblemError."""
        return await self._bus.ask(commands.History(), list[wire.Point])

    async def events_after(self, seq: int, kind: wire.EventKind | None = None) -> MissedEvents:
        """All events after `seq`, or those of one `kind`: `lost` then counts the others too.

        Raises ProblemError.
        """
        events: list[wire.Event] = []
        last = seq
        while True:
            call = commands.Events(after=last, limit=EVENT_PAGE, kind=kind)
            page = await self._bus.ask(call, wire.EventPage)
            events += page.events
            if page.events:
                last = page.events[-1].seq
            if not page.events or last >= page.last_seq:
                lost = max(0, page.last_seq - seq) - len(events)
                return MissedEvents(events, lost, page.last_seq)

    def tell(self, kind: wire.EventKind, act: Callable[[wire.Event], None]) -> None:
        """Call `act` with each event of `kind`; it must not block."""
        self._told.append((kind, act))

    def join(self, listener: Listener) -> None:
        """Add a client: it gets every event, and is woken for frames if it wants state."""
        self._listeners.add(listener)
        self._update_subscription()

    def leave(self, listener: Listener) -> None:
        """Remove a client; the engine stops publishing state when no client wants it."""
        self._listeners.discard(listener)
        self._update_subscription()

    # ------------------------------------------------------------ inside

    async def _follow(self) -> None:
        endpoint = (await self.describe()).telemetry_endpoint
        # Read before the subscription, so that an event missed in between shows as a gap.
        newest = await self._bus.ask(commands.Events(limit=1), wire.EventPage)
        self.last_event = newest.last_seq
        self._reader = TelemetryReader(endpoint, self._on_frame, self._on_events)
        self._update_subscription()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reader.run())
                group.create_task(self._keep_fresh())
        finally:
            self._reader = None  # its sockets are closed

    async def _keep_fresh(self) -> None:
        """Poll an idle engine, which publishes nothing, while a client wants state."""
        while True:
            await asyncio.sleep(max(MIN_REFRESH_S, FRESH_S - self._age()))
            if self.wants_state and self._age() >= FRESH_S and self.alive:
                with contextlib.suppress(ProblemError):
                    await self.current()

    def _on_frame(self, frame: wire.Frame) -> None:
        if self.state is not None or frame.status is not None:
            self._take(frame)

    def _take(self, frame: wire.Frame) -> None:
        if frame.status is not None:
            self.complete(frame.status)
        if frame.config is not None:
            frame.config.engine = self.rank
        self.state = (self.state or EngineState()).after(Difference.of(frame))
        self._state_at = asyncio.get_running_loop().time()
        for listener in self._listeners:
            listener.wake()

    async def _on_events(self, events: list[wire.Event]) -> None:
        lost = 0
        last = self.last_event
        events = [event for event in events if event.seq > last]
        if events and events[0].seq > last + 1:
            events, lost = await self._fill(last, events)
        if events:
            self.last_event = events[-1].seq
            for listener in tuple(self._listeners):
                listener.offer(events, lost)
            for event in events:
                for kind, act in self._told:
                    if event.kind == kind:
                        act(event)

    async def _fill(self, last: int, events: list[wire.Event]) -> tuple[list[wire.Event], int]:
        """`events`, preceded by those since `last` that the engine holds, and the number lost."""
        first = events[0].seq
        held: list[wire.Event] = []
        with contextlib.suppress(ProblemError):
            missed = await self.events_after(last)
            held = [event for event in missed.events if event.seq < first]
        return held + events, first - last - 1 - len(held)

    def _update_subscription(self) -> None:
        if self._reader is not None:
            self._reader.want_state(self.wants_state)

    @property
    def wants_state(self) -> bool:
        """Whether any client wants frames."""
        return any(listener.wants_state for listener in self._listeners)

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._state_at
