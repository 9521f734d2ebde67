"""The loose tokens of one table: those that live in blocks which are not full of live tokens.

Packed for attention where a kernel reads whole blocks. Follows single tokens that come and go; any
other change of the table makes a new one. Arrays that were handed out are not written again.
"""

from __future__ import annotations

import numpy as np

from vtoken.arrays import Ints
from vtoken.tables.places import Places


class LooseTokens:
    """`full_blocks` [f] in block table order; `slots` [l] of the loose tokens, newest last."""

    def __init__(self, places: Places, blocks: Ints) -> None:
        s = places.block_size
        full = places.live[: len(blocks)] == s
        occupied = np.flatnonzero(places.occupied[: len(blocks) * s])
        ranks, offsets = np.divmod(occupied, s)
        loose = ~full[ranks]
        self.full_blocks: Ints = blocks[full]
        self._slots: Ints = blocks[ranks[loose]] * s + offsets[loose]
        self._count = len(self._slots)

    @property
    def slots(self) -> Ints:
        return self._slots[: self._count]

    def add(self, slot: int) -> None:
        """One more token lives at `slot`, whose block is not full yet."""
        if self._count == len(self._slots):
            grown = np.empty(max(32, 2 * self._count), dtype=np.int64)
            grown[: self._count] = self._slots
            self._slots = grown
        self._slots[self._count] = slot
        self._count += 1

    def remove(self, slot: int) -> None:
        """The loose token at `slot` is dead."""
        self._slots = self.slots[self.slots != slot]
        self._count = len(self._slots)
