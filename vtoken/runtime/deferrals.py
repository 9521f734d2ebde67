"""What held rounds back: counted a step by its first reason, and told now and then.

Knows the ledger's counters and events, neither tables nor planners. `Counters.deferrals` says what
each count means.
"""

from __future__ import annotations

import time

from vtoken.planning.gates import DEFERRALS
from vtoken.runtime.state import Ledger

EVENT_SECONDS = 5.0
HEADROOM, IN_FLIGHT = map(DEFERRALS.index, ("headroom", "in_flight"))


class Deferrals:
    """Notes of one ledger's rounds; `closed_gate` holds back the automatic round of this step."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last_event = 0.0
        self.closed_gate: int | None = None

    def note_held_back(self) -> None:
        """A round could have gained something in this step: count the gate that was closed."""
        if self.closed_gate is not None:
            self._ledger.counters.deferrals[self.closed_gate] += 1

    def note_headroom(self) -> None:
        """An automatic round lacked fresh blocks."""
        self._ledger.counters.deferrals[HEADROOM] += 1

    def note_in_flight(self) -> None:
        """An automatic round found nothing but requests whose relocations are not reported."""
        self._ledger.counters.deferrals[IN_FLIGHT] += 1

    def tell(self, missing: int, available: int) -> None:
        """A round, automatic or not, lacked `missing` fresh blocks beyond `available`."""
        ledger = self._ledger
        ledger.counters.deferred_rounds += 1
        now = time.monotonic()
        if now - self._last_event < EVENT_SECONDS:
            return
        self._last_event = now
        ledger.events.add(
            ledger.step,
            "deferred",
            f"deferred: {missing} more headroom blocks needed than the {available} available",
            {
                "reason": "headroom",
                "needed_blocks": missing + available,
                "available_blocks": available,
            },
        )
