"""`attention_hits` on the host in bits: W / 8 bytes a live token in place of W."""

from __future__ import annotations

import numpy as np

from vtoken.policies.signals.accumulators import Accumulator, accelerate
from vtoken.policies.signals.kind import Array


@accelerate("attention_hits", "host")
class HitBits(Accumulator):
    """Row r has the queries 8 r .. 8 r + 7 of the window, one bit each."""

    def _layout(self) -> tuple[int, str]:
        return -(-self.signal.window_queries // 8), "uint8"

    def _write(self, columns: Array, given: Array) -> None:
        for hits in given:
            row, bit = columns[self._next // 8], np.uint8(1 << self._next % 8)
            row &= ~bit
            row |= hits * bit
            self._next = (self._next + 1) % self.signal.window_queries

    def _read(self, columns: Array) -> Array:
        return np.bitwise_count(columns).sum(axis=0, dtype=np.float32)
