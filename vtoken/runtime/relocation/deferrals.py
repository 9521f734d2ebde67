"""What held rounds back: counted a step by its first reason, and told now and then.

Knows the runtime's counters and events, neither tables nor planners. `Counters.deferrals` says what
each count means.
"""

from __future__ import annotations

import time

from vtoken.planning.gates import DEFERRALS
from vtoken.runtime.state import RuntimeState

EVENT_SECONDS = 5.0
HEADROOM, IN_FLIGHT = map(DEFERRALS.index, ("headroom", "in_flight"))


class Deferrals:
    """Notes of one runtime's rounds."""

    def __init__(self, state: RuntimeState) -> None:
        self._state = state
        self._last_event = 0.0
        self._closed_gate: int | None = None

    def begin_step(self, closed_gate: int | None = None) -> None:
        """`closed_gate` holds back the automatic round of this step; None: no gate does."""
        self._closed_gate = closed_gate

    def note_held_back(self) -> None:
        """A round could have gained something in this step: count the gate that was closed."""
        if self._closed_gate is not None:
            self._state.counters.deferrals[self._closed_gate] += 1

    def note_headroom(self) -> None:
        """An automatic round lacked fresh blocks."""
        self._state.counters.deferrals[HEADROOM] += 1

    def note_in_flight(self) -> None:
        """An automatic round found nothing but requests whose relocations are not reported."""
        self._state.counters.deferrals[IN_FLIGHT] += 1

    def tell(self, missing: int, available: int) -> None:
        """A round, automatic or not, lacked `missing` fresh blocks beyond `available`."""
        state = self._state
        state.counters.deferred_rounds += 1
        now = time.monotonic()
        if now - self._last_event < EVENT_SECONDS:
            return
        self._last_event = now
        state.events.add(
            state.step,
            "deferred",
            f"deferred: {missing} more headroom blocks needed than the {available} available",
            {
                "reason": "headroom",
                "needed_blocks": missing + available,
                "available_blocks": available,
            },
        )
