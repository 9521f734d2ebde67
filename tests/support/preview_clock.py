"""A clock for the preview of a compaction, which is planned again after some time."""

from __future__ import annotations

import time

import pytest

from vtoken.control import diagnosis


class Clock:
    """Elapsed and CPU time [s] as the diagnosis reads them; they pass when a test says so."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.cpu_a_plan = 1.0  # more CPU time than a plan may take: the next one has to wait
        self._cpu = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        monkeypatch.setattr(diagnosis, "time", self)
        return self

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        self._cpu += self.cpu_a_plan
        return self._cpu

    def pass_long(self) -> None:
        """From here, the next preview is planned anew."""
        self.now += 1e6
