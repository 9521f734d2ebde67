"""How far a long measurement is."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line a step on stderr: how many of how many, and how long the rest may take."""

    def __init__(self, title: str, total: int, known: int) -> None:
        self._title, self._total, self._done, self._known = title, total, 0, known
        self._started = time.monotonic()

    def step(self, what: str, count: int = 1) -> None:
        self._done += count
        spent = time.monotonic() - self._started
        rest = spent / self._done * (self._total - self._known - self._done)
        at = f"{self._known + self._done} of {self._total}"
        line = f"{self._title}: {at}, about {rest / 60:.0f} min left; {what}"
        print(line, file=sys.stderr, flush=True)
