"""The event log: bounded, numbered without gaps, readable from any sequence number still held.

`drain` hands new events to the publisher once. Every kind has its own ring buffer, so frequent
kinds never displace others: relocations, up to one per step, do not push out last week's
configuration changes and violations.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from itertools import islice, takewhile
from typing import Any

from vtoken.wire import Event, EventKind, EventPage

MAX_DRAINED = 1_000  # events per call of `drain`


def _seq(event: Event) -> int:
    return event.seq


class EventLog:
    """This engine's newest events, numbered from 1: at most `capacity` of each kind."""

    def __init__(self, capacity: int = 5_000) -> None:
        self._capacity = capacity
        self._rings: dict[str, deque[Event]] = {}  # by kind, each in the order of `seq`
        self._drained_seq = 0
        self.last_seq = 0

    def add(self, step: int, kind: EventKind, summary: str, data: dict[str, Any]) -> Event:
        self.last_seq += 1
        event = Event(
            seq=self.last_seq, ts=time.time(), step=step, kind=kind, summary=summary, data=data
        )
        ring = self._rings.get(kind)
        if ring is None:
            ring = self._rings[kind] = deque(maxlen=self._capacity)
        ring.append(event)
        return event

    def drain(self) -> list[Event]:
        """The oldest `MAX_DRAINED` events not drained yet, oldest first."""
        if self._drained_seq == self.last_seq:
            return []
        events = self.page(self._drained_seq, MAX_DRAINED).events
        self._drained_seq = events[-1].seq
        return events

    def page(self, after: int | None, limit: int, kind: str | None = None) -> EventPage:
        """The first `limit` events with seq > `after`, None: the newest `limit`; oldest first.

        Only of `kind` if given. Takes time proportional to the newer events only, so polling for
        new events is cheap.
        """
        rings = self._rings.values() if kind is None else [self._rings.get(kind, deque[Event]())]
        newest_first = heapq.merge(*map(reversed, rings), key=_seq, reverse=True)
        if after is None:
            events = [*islice(newest_first, limit)][::-1]
        else:
            events = [*takewhile(lambda e: e.seq > after, newest_first)][::-1][:limit]
        return EventPage(
            events=events,
            first_seq=min((ring[0].seq for ring in self._rings.values()), default=1),
            last_seq=self.last_seq,
        )
