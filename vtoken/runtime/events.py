"""The event log: bounded, numbered without gaps, readable from any sequence number still held.

Knows nothing of who listens; `drain` hands the newest events to a publisher once. The frequent
kinds (one a step) are kept in a ring of their own, so that they never push out what an operator
looks for later.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from itertools import islice, takewhile
from typing import Any

from vtoken.wire import Event, EventKind, EventPage

FREQUENT: frozenset[EventKind] = frozenset({"eviction", "reclaimed"})


def counted(n: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _seq(event: Event) -> int:
    return event.seq


class EventLog:
    """The newest events of this engine's life, numbered from 1: `capacity` of either sort."""

    def __init__(self, capacity: int = 5_000) -> None:
        self._rare: deque[Event] = deque(maxlen=capacity)
        self._frequent: deque[Event] = deque(maxlen=capacity)
        self._unpublished: deque[Event] = deque(maxlen=capacity)
        self.last_seq = 0

    def add(self, step: int, kind: EventKind, summary: str, data: dict[str, Any]) -> Event:
        self.last_seq += 1
        event = Event(
            seq=self.last_seq, ts=time.time(), step=step, kind=kind, summary=summary, data=data
        )
        (self._frequent if kind in FREQUENT else self._rare).append(event)
        self._unpublished.append(event)
        return event

    def drain(self) -> list[Event]:
        """Events added since the last call, oldest first."""
        events = list(self._unpublished)
        self._unpublished.clear()
        return events

    def page(self, after: int, limit: int, kind: str | None = None) -> EventPage:
        """Up to `limit` events with seq > `after`, of `kind` only if given, oldest first.

        With `kind`, the work is that of the newer events alone: it may be asked often.
        """
        if kind is None:
            merged = heapq.merge(self._rare, self._frequent, key=_seq)
            events = list(islice((e for e in merged if e.seq > after), limit))
        else:
            newest = reversed(self._frequent if kind in FREQUENT else self._rare)
            newer = [e for e in takewhile(lambda e: e.seq > after, newest) if e.kind == kind]
            events = newer[::-1][:limit]
        first = min(
            (ring[0].seq for ring in (self._rare, self._frequent) if ring),
            default=self.last_seq + 1,
        )
        return EventPage(events=events, first_seq=first, last_seq=self.last_seq)
