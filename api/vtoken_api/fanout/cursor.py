"""What one client was last sent, and the fields of its next message.

A snapshot with every later delta applied, in order, equals the newest view that the cursor was
given, in the client's topics.
"""

from __future__ import annotations

from typing import Any

from vtoken.wire.views import Change, View

STATE_TOPICS = frozenset({"blocks", "requests", "metrics"})
TOPICS = (*sorted(STATE_TOPICS), "events")


class StateCursor:
    """The view that one client was last sent, of its topics."""

    def __init__(self, topics: frozenset[str], *, packed: bool) -> None:
        self._topics = topics
        self._packed = packed
        self._sent: View | None = None

    def snapshot(self, view: View) -> dict[str, Any]:
        """Fields of a `wire.Snapshot` of `view`; the next delta starts from here."""
        self._sent = self._part(view)
        fields = Change.whole(self._sent).as_snapshot(packed=self._packed)
        return fields if "requests" in self._topics else fields | {"requests": None}

    def delta(self, view: View) -> dict[str, Any]:
        """Fields of a `wire.Delta` from the last view to `view`; {} if nothing differs."""
        if self._sent is None:
            raise RuntimeError("a delta needs a snapshot before it")
        before, self._sent = self._sent, self._part(view)
        return Change.between(before, self._sent).as_delta(packed=self._packed)

    def _part(self, view: View) -> View:
        """What the client's topics have of `view`."""
        return View(
            view.step,
            view.blocks if "blocks" in self._topics else {},
            view.requests if "requests" in self._topics else {},
            view.status if "metrics" in self._topics else None,
            view.config,
            view.engine,
        )
