"""The console's own cost: bytes to the terminal, bytes received, frames, CPU, memory.

The components that cause the cost increment the counters; `sample` reads them once a second. Rates
are means over the newest sampling window.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 1.0
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class CostSample:
    """`cpu_ratio`: of one core. `dropped`: frames not drawn since the start."""

    written_per_s: float = 0.0  # bytes to the terminal
    received_per_s: float = 0.0  # bytes from the server
    drawn_per_s: float = 0.0  # frames
    cpu_ratio: float = 0.0
    rss_bytes: int = 0
    drawn: int = 0
    dropped: int = 0


NO_COST = CostSample()


class Cost:
    """Counters since the start of this console, and their newest sample."""

    def __init__(self) -> None:
        self.written_bytes = 0
        self.received_bytes = 0
        self.drawn = 0
        self.dropped = 0
        self.newest = NO_COST
        self._last: tuple[float, float, int, int, int] | None = None

    def sample(self, now: float) -> CostSample:
        """The newest sample, refreshed every SAMPLE_S; `now` is monotonic [s]."""
        cpu = time.process_time()
        counts = (now, cpu, self.written_bytes, self.received_bytes, self.drawn)
        if self._last is None:
            self._last = counts
            return self.newest
        then, cpu_then, written, received, drawn = self._last
        spent = now - then
        if spent < SAMPLE_S:
            return self.newest
        self._last = counts
        self.newest = CostSample(
            written_per_s=(self.written_bytes - written) / spent,
            # `received_bytes` restarts at 0 if the source is replaced.
            received_per_s=max(0, self.received_bytes - received) / spent,
            drawn_per_s=(self.drawn - drawn) / spent,
            cpu_ratio=(cpu - cpu_then) / spent,
            rss_bytes=rss_bytes(),
            drawn=self.drawn,
            dropped=self.dropped,
        )
        return self.newest


def rss_bytes() -> int:
    """The resident memory of this process; its peak on systems without /proc."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
