"""The peaks of one engine over the last 24 hours, from the statuses that this process sees."""

from __future__ import annotations

from collections import defaultdict

from vtoken import wire

HOUR_S = 3600.0
NUM_HOURS = 24


class Peaks:
    """The peak of each fact in each of the newest `NUM_HOURS` hours, which begin at full hours.

    So a peak is known for 23 to 24 hours.
    """

    def __init__(self) -> None:
        self._of_facts: defaultdict[wire.PeakName, dict[int, wire.Peak]] = defaultdict(dict)

    def after(self, status: wire.Status) -> list[wire.Peak]:
        """The highest of all hours, with those of `status`; the first of equal ones."""
        hour = int(status.ts / HOUR_S)
        for name, value in _facts(status).items():
            peaks = self._of_facts[name]
            if value is not None and value > (peaks[hour].value if hour in peaks else 0.0):
                peaks[hour] = wire.Peak(name=name, value=value, ts=status.ts)
            for old in [known for known in peaks if known <= hour - NUM_HOURS]:
                del peaks[old]
        found = filter(None, self._of_facts.values())
        return [max(peaks.values(), key=lambda peak: peak.value) for peaks in found]


def _facts(status: wire.Status) -> dict[wire.PeakName, float | None]:
    """The value of each fact in `status`; None if it has none now."""
    blocks, latency, pressure = status.blocks, status.latency, status.pressure
    return {
        "waiting": status.requests.waiting,
        "short_blocks": None if pressure is None else pressure.short_blocks,
        "used_share": 1 - blocks.free / blocks.total,
        "ttft_p95_ms": None if latency is None else latency.ttft.p95_ms,
        "inter_token_p95_ms": None if latency is None else latency.inter_token.p95_ms,
    }
