"""Liveness of the whole block pool: how many requests read each slot, n_b of each block, and F.

Knows neither requests nor policies: it is told which slots gain or lose a reader, and the number of
who holds or drops a block. N blocks of S slots; slot = block * S + offset.

Invariants, with everything kept incrementally (`check` recomputes it):
1. live[b] = |{o : readers[b * S + o] > 0}|                     (n_b of the paper)
2. readers[b, :] = 0 where holders[b] = 0
3. num_used = |{b : holders[b] > 0}|,  num_live = sum of live
4. F = 1 - num_live / (num_used * S), 0 for an empty pool        (paper 2.3.1)
5. usage[b] = 0 for a free block, FLAG_USED for a held one, and FLAG_SHARED too where holders[b] > 1
6. owner[b] = number of the newest holder, 0 where holders[b] = 0; where `bereaved[b]`, the newest
   one has left while others stayed, and `TokenTables.owners` finds out who is newest now
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Ints
from vtoken.errors import InvariantViolation
from vtoken.wire import FLAG_SHARED, FLAG_USED

FEW = 8  # up to here plain indexing is faster than arrays
ONE = np.uint16(1)  # `ufunc.at` is a hundred times slower where it has to cast


class PoolLiveness:
    """Incremental liveness counts; every method costs as much as the slots it is given."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.readers = np.zeros(num_blocks * block_size, dtype=np.uint16)
        self.live = np.zeros(num_blocks, dtype=np.uint16)
        self.holders = np.zeros(num_blocks, dtype=np.uint16)
        self.usage = np.zeros(num_blocks, dtype=np.uint8)
        self.owner = np.zeros(num_blocks, dtype=np.uint16)
        self.bereaved = np.zeros(num_blocks, dtype=np.bool_)
        self.tails: dict[str, int] = {}  # block that each holder appends to; 0: it has none
        self.any_bereaved = False  # where no block is, True costs a look and nothing else
        self.num_used = 0
        self.num_live = 0

    @property
    def fragmentation(self) -> float:
        """F: the share of used slots that hold no live token."""
        if self.num_used == 0:
            return 0.0
        return 1.0 - self.num_live / (self.num_used * self.block_size)

    def hold(self, blocks: Sequence[int], number: int = 0) -> None:
        """One more request, that of `number`, holds each of `blocks` (each named once)."""
        if len(blocks) > FEW:
            array = np.asarray(blocks, dtype=np.int64)
            self.num_used += len(array) - int(np.count_nonzero(self.holders[array]))
            self.holders[array] += 1
            self.usage[array] = _usage(self.holders[array])
            self.owner[array] = number
            return
        for block in blocks:
            if self.holders[block] == 0:
                self.num_used += 1
                self.usage[block] = FLAG_USED
            else:
                self.usage[block] = FLAG_USED | FLAG_SHARED
            self.holders[block] += 1
            self.owner[block] = number

    def drop(self, blocks: Sequence[int], number: int = 0) -> None:
        """The request of `number` no longer holds `blocks`; it has removed its readers first."""
        if len(blocks) > FEW:
            array = np.asarray(blocks, dtype=np.int64)
            if self.holders[array].min() == 0:
                raise InvariantViolation("I2", "a block is dropped but held by nobody")
            self.holders[array] -= 1
            held = self.holders[array] > 0
            self.num_used -= len(array) - int(np.count_nonzero(held))
            self.usage[array] = _usage(self.holders[array])
            self.bereaved[array] |= held & (self.owner[array] == number)
            self.any_bereaved = self.any_bereaved or bool(held.any())
            self.owner[array[~held]] = 0
            return
        for block in blocks:
            if self.holders[block] == 0:
                raise InvariantViolation("I2", f"block {block} is dropped but held by nobody")
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.num_used -= 1
                self.usage[block] = self.owner[block] = 0
                continue
            if self.holders[block] == 1:
                self.usage[block] = FLAG_USED
            if self.owner[block] == number:
                self.bereaved[block] = self.any_bereaved = True

    def add(self, slots: Ints) -> None:
        """One more reader for each of `slots` [n] (each named once)."""
        if len(slots) == 1:  # decoding: plain indexing is several times faster than arrays
            slot = int(slots[0])
            if self.readers[slot] == 0:
                self.live[slot // self.block_size] += 1
                self.num_live += 1
            self.readers[slot] += 1
            return
        fresh = slots[self.readers[slots] == 0]
        self.readers[slots] += 1
        np.add.at(self.live, fresh // self.block_size, ONE)
        self.num_live += len(fresh)

    def remove(self, slots: Ints) -> None:
        """One reader fewer for each of `slots` [n] (each named once)."""
        if len(slots) == 0:
            return
        if len(slots) == 1 and self.readers[slots[0]] > 0:
            slot = int(slots[0])
            self.readers[slot] -= 1
            if self.readers[slot] == 0:
                self.live[slot // self.block_size] -= 1
                self.num_live -= 1
            return
        if self.readers[slots].min() == 0:
            raise InvariantViolation("I2", "a slot loses a reader that it never had")
        self.readers[slots] -= 1
        dead = slots[self.readers[slots] == 0]
        np.subtract.at(self.live, dead // self.block_size, ONE)
        self.num_live -= len(dead)

    def num_partially_live(self) -> int:
        return int(np.count_nonzero(self.live)) - int(
            np.count_nonzero(self.live == self.block_size)
        )

    def num_low_utilization(self) -> int:
        """Used blocks with n_b <= S / 2 (paper figure 2)."""
        num_free = self.num_blocks - self.num_used  # n_b = 0 there
        return int(np.count_nonzero(self.live <= self.block_size // 2)) - num_free

    def num_shared(self) -> int:
        return int(np.count_nonzero(self.usage > FLAG_USED))

    def check(self) -> None:
        """Recompute everything; raises InvariantViolation with both numbers."""
        grid = self.readers.reshape(self.num_blocks, self.block_size)
        live = np.count_nonzero(grid, axis=1)
        wrong = np.flatnonzero(live != self.live)
        if len(wrong):
            b = int(wrong[0])
            raise InvariantViolation(
                "I2", f"live[{b}] = {self.live[b]}, but {live[b]} of its slots have a reader"
            )
        orphans = np.flatnonzero((self.holders == 0) & (live > 0))
        if len(orphans):
            raise InvariantViolation("I2", f"block {orphans[0]} has readers but no holder")
        named = np.flatnonzero((self.holders == 0) & (self.owner > 0))
        if len(named):
            b = int(named[0])
            raise InvariantViolation("I2", f"owner[{b}] = {self.owner[b]}, but nobody holds it")
        wrong = np.flatnonzero(_usage(self.holders) != self.usage)
        if len(wrong):
            b = int(wrong[0])
            raise InvariantViolation(
                "I2", f"usage[{b}] = {self.usage[b]}, but {self.holders[b]} requests hold it"
            )
        if self.bereaved.any() and not self.any_bereaved:
            raise InvariantViolation("I2", "a block lost its newest holder unnoticed")
        used = int(np.count_nonzero(self.holders))
        if used != self.num_used or int(live.sum()) != self.num_live:
            raise InvariantViolation(
                "I2",
                f"num_used = {self.num_used} (counted {used}), "
                f"num_live = {self.num_live} (counted {int(live.sum())})",
            )


def _usage(holders: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """The flags of blocks that so many requests hold."""
    usage = (holders > 0).view(np.uint8) * np.uint8(FLAG_USED)
    usage |= (holders > 1).view(np.uint8) * np.uint8(FLAG_SHARED)
    return usage
