"""What the screen draws from, fed message by message: the model, its series, their marks.

Knows the wire, no socket and no file. A live stream and a recording feed it alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from vtoken import wire
from vtoken.stream.reducer import StreamState, apply, with_events
from vtoken_console.feed.samples import NAMES, Sampler, marker_of
from vtoken_console.feed.series import Series

MAX_AUDIT = 200


class Picture:
    """`model` and `series` after every message taken.

    `audit`: of a recording, who changed or tried out what, oldest first; the newest MAX_AUDIT.
    """

    def __init__(self) -> None:
        self.model = StreamState()
        self.series = Series(NAMES)
        self.audit: tuple[wire.AuditEntry, ...] = ()
        self._sampler = Sampler()

    def take(self, message: wire.StreamMessage) -> None:
        """Applies a message as a whole, or raises ResyncNeeded."""
        old = self.model
        self.model = apply(old, message)
        if isinstance(message, wire.EventMessage):
            self._mark(message.event)
        status = self.model.status
        if status is not None and status is not old.status:
            self.sample(status)

    def sample(self, status: wire.Status) -> None:
        """A point of every chart."""
        self.series.add(status.ts, self._sampler.sample(status))

    def remember(self, events: Iterable[wire.Event]) -> None:
        """Events of before, into the log and onto the charts."""
        events = tuple(events)
        self.model = with_events(self.model, events)
        for event in events:
            self._mark(event)

    def add_audit(self, entries: Iterable[wire.AuditEntry]) -> None:
        """Who changed or tried out what, of a recording, into the log."""
        self.audit = (*self.audit, *entries)[-MAX_AUDIT:]

    def _mark(self, event: wire.Event) -> None:
        marker = marker_of(event)
        if marker is not None:
            self.series.mark(marker)
