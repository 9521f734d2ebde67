"""Deferred rounds: counted once per step by the first reason, with a rate-limited event.

Independent of tables and planners. `Counters.deferrals` defines each count.
"""

from __future__ import annotations

import time

from vtoken.planning.gates import DEFERRALS
from vtoken.runtime.state import RuntimeState

EVENT_SECONDS = 5.0
HEADROOM, IN_FLIGHT = map(DEFERRALS.index, ("headroom", "in_flight"))


class Deferrals:
    """Counts the deferred rounds of one runtime."""

    def __init__(self, state: RuntimeState) -> None:
        self._state = state
        self._last_event = 0.0
        self._closed_gate: int | None = None

    def begin_step(self, closed_gate: int | None = None) -> None:
        """Begin a step whose automatic round `closed_gate` defers; None: no gate does."""
        self._closed_gate = closed_gate

    def note_held_back(self) -> None:
        """Count the closed gate: a round could have gained something in this step."""
        if self._closed_gate is not None:
            self._state.counters.deferrals[self._closed_gate] += 1

    def note_headroom(self) -> None:
        """Count an automatic round that lacked fresh blocks."""
        self._state.counters.deferrals[HEADROOM] += 1

    def note_in_flight(self) -> None:
        """Count an automatic round that found only requests with relocations in flight."""
        self._state.counters.deferrals[IN_FLIGHT] += 1

    def add_event(self, missing: int, available: int) -> None:
        """Count and report a round, automatic or manual, that lacked `missing` fresh blocks beyond
        `available`; one event per `EVENT_SECONDS`.
        """
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
