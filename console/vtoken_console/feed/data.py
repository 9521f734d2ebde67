"""The data that the screen draws: the model, the chart series with their markers, audit entries.

Live streams and recordings apply their messages in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

from vtoken import wire
from vtoken.wire.reducer import StreamState, apply, with_events
from vtoken_console.feed.samples import NAMES, Sampler, marker_of
from vtoken_console.feed.series import Series

MAX_AUDIT = 200


class FeedData:
    """`model` and `series` after every applied message.

    `audit`: the newest MAX_AUDIT audit entries of a recording, oldest first.
    """

    def __init__(self) -> None:
        self.model = StreamState()
        self.series = Series(NAMES)
        self.audit: tuple[wire.AuditEntry, ...] = ()
        self._sampler = Sampler()

    def apply(self, message: wire.StreamMessage) -> None:
        """Applies a message; raises ResyncNeeded without applying a part of it."""
        old = self.model
        self.model = apply(old, message)
        if self.model.epoch != old.epoch:
            self.audit = ()  # they belong to another run of the server
        if isinstance(message, wire.EventMessage):
            self._mark(message.event)
        if isinstance(message, wire.Snapshot):
            for point in message.history:
                if point.ts > self.series.last_ts:  # the others are known
                    self.add_sample(point)
        status = self.model.status
        if status is not None and status is not old.status:
            self.add_sample(wire.Point.of(status))

    def add_sample(self, point: wire.Point) -> None:
        """Adds a value to every chart."""
        self.series.add(point.ts, self._sampler.sample(point))

    def add_past_events(self, events: Iterable[wire.Event]) -> None:
        """Adds earlier events to the log and their markers to the charts."""
        events = tuple(events)
        self.model = with_events(self.model, events)
        for event in events:
            self._mark(event)

    def add_audit(self, entries: Iterable[wire.AuditEntry]) -> None:
        """Adds a recording's audit entries to the log."""
        self.audit = (*self.audit, *entries)[-MAX_AUDIT:]

    def _mark(self, event: wire.Event) -> None:
        marker = marker_of(event)
        if marker is not None:
            self.series.mark(marker)
