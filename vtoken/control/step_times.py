"""The time between two steps while requests run or wait: the median of the newest ones.

A step that computes a long prompt takes many times as long as one that decodes. The median is the
time of the usual step, whatever the others take.
"""

from __future__ import annotations

from collections import deque
from statistics import median

NUM_STEPS = 64


class StepTimes:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._newest_ms: deque[float] = deque(maxlen=NUM_STEPS)
        self._since: float | None = None  # the end of the newest step, if others follow at once
        self.newest_ms: float = 0.0  # 0: no step came before it, or a pause

    def ended(self, now: float, *, idle: bool) -> None:
        """A step ended; `idle`: no request is left."""
        self.newest_ms = 0.0
        if self._since is not None:
            self.newest_ms = (now - self._since) * 1e3
            self._newest_ms.append(self.newest_ms)
        self._since = None if idle else now

    def leave_out(self) -> None:
        """A pause begins or ends: the time since the newest step is no step's."""
        self._since = None

    @property
    def median_ms(self) -> float:
        """0 before two steps followed each other."""
        return median(self._newest_ms) if self._newest_ms else 0.0
