"""What a latency meter still holds."""

from __future__ import annotations

from vtoken.core.runtime.latency import LatencyMeter


def num_tracked(meter: LatencyMeter) -> int:
    """Requests that the meter has not forgotten."""
    assert len(meter._first) <= len(meter._last) + len(meter._cohort)
    return len(meter._last) + len(meter._arrived) + len(meter._cohort)
