"""What one client was last sent, and the fields of its next message.

A snapshot with every later delta applied, in order, equals the newest state that the cursor was
given, in the client's topics.
"""

from __future__ import annotations

from typing import Any

from vtoken.wire.engine_state import Difference, EngineState

STATE_TOPICS = frozenset({"blocks", "requests", "metrics"})
TOPICS = (*sorted(STATE_TOPICS), "events")


class StateCursor:
    """The state that one client was last sent, of its topics."""

    def __init__(self, topics: frozenset[str], *, packed: bool) -> None:
        self._topics = topics
        self._packed = packed
        self._sent: EngineState | None = None

    def snapshot(self, state: EngineState) -> dict[str, Any]:
        """Fields of a `wire.Snapshot` of `state`; the next delta starts from here."""
        self._sent = self._part(state)
        fields = Difference.whole(self._sent).as_snapshot(packed=self._packed)
        return fields if "requests" in self._topics else fields | {"requests": None}

    def delta(self, state: EngineState) -> dict[str, Any]:
        """Fields of a `wire.Delta` from the last state to `state`; {} if nothing differs."""
        if self._sent is None:
            raise RuntimeError("a delta needs a snapshot before it")
        before, self._sent = self._sent, self._part(state)
        return Difference.between(before, self._sent).as_delta(packed=self._packed)

    def _part(self, state: EngineState) -> EngineState:
        """What the client's topics have of `state`."""
        return EngineState(
            state.step,
            state.blocks if "blocks" in self._topics else {},
            state.requests if "requests" in self._topics else {},
            state.status if "metrics" in self._topics else None,
            state.config,
            state.engine,
        )
