"""Liveness of the block pool: readers of each slot, live slots n_b of each block, and F.

Independent of requests and policies. The kernels of `vtoken.core.tables.kernels` update these
arrays with every change of a table. N blocks of S slots; slot = block * S + offset.

Invariants, maintained incrementally (`check` recomputes them):
1. live[b] = |{o : readers[b * S + o] > 0}|                     (n_b of the paper)
2. readers[b, :] = 0 where holders[b] = 0
3. num_used = |{b : holders[b] > 0}|,  num_shared = |{b : holders[b] > 1}|,  num_live = sum of live
4. F = 1 - num_live / (num_used * S), 0 for an empty pool        (paper 2.3.1)
5. usage[b] = 0 for a free block, FLAG_USED for a held one, and FLAG_SHARED too where holders[b] > 1
6. owner[b] = number of the newest holder, 0 where holders[b] = 0; `owner_stale[b]` means the newest
   holder left before the others, and `TokenTables.owners` recomputes it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Bools, Ints
from vtoken.base.errors import InvariantViolation, UnsupportedError
from vtoken.wire import FLAG_SHARED, FLAG_USED

MAX_BLOCK_SIZE = 65_535  # `live` is uint16
MAX_SLOTS = 2**31 - 1  # slots and places are int32 in columns, mirrors and page tables


class PoolArrays(NamedTuple):
    """The arrays of `PoolLiveness`, for kernels."""

    readers: npt.NDArray[np.uint16]
    live: npt.NDArray[np.uint16]
    holders: npt.NDArray[np.uint16]
    usage: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.uint16]
    owner_stale: Bools
    counts: Ints


class PoolLiveness:
    """`readers` [N * S]; `live`, `holders`, `usage`, `owner`, `owner_stale` [N].

    `counts`: num_used, num_live and num_shared. Raises UnsupportedError when the pool is too large
    to count.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size > MAX_BLOCK_SIZE:
            raise UnsupportedError(
                f"blocks of {block_size:,} slots: at most {MAX_BLOCK_SIZE:,}; set --block-size"
            )
        if num_blocks * block_size > MAX_SLOTS:
            raise UnsupportedError(
                f"{num_blocks:,} blocks of {block_size:,} slots: at most {MAX_SLOTS:,} slots in "
                "all; set --num-gpu-blocks-override"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.readers = np.zeros(num_blocks * block_size, dtype=np.uint16)
        self.live = np.zeros(num_blocks, dtype=np.uint16)
        self.holders = np.zeros(num_blocks, dtype=np.uint16)
        self.usage = np.zeros(num_blocks, dtype=np.uint8)
        self.owner = np.zeros(num_blocks, dtype=np.uint16)
        self.owner_stale = np.zeros(num_blocks, dtype=np.bool_)
        self.counts: Ints = np.zeros(3, dtype=np.int64)
        self.arrays = PoolArrays(
            self.readers,
            self.live,
            self.holders,
            self.usage,
            self.owner,
            self.owner_stale,
            self.counts,
        )

    @property
    def num_used(self) -> int:
        return int(self.counts[0])

    @property
    def num_live(self) -> int:
        return int(self.counts[1])

    @property
    def fragmentation(self) -> float:
        """F: the share of used slots that hold no live token."""
        if self.num_used == 0:
            return 0.0
        return 1.0 - self.num_live / (self.num_used * self.block_size)

    def num_partially_live(self) -> int:
        return int(np.count_nonzero(self.live)) - int(
            np.count_nonzero(self.live == self.block_size)
        )

    def num_low_utilization(self) -> int:
        """Used blocks with n_b <= S / 2 (paper figure 2)."""
        num_free = self.num_blocks - self.num_used  # n_b = 0 there
        return int(np.count_nonzero(self.live <= self.block_size // 2)) - num_free

    def num_without_holder(self, blocks: Iterable[int]) -> int:
        """How many of `blocks`, which may contain one twice, no request holds."""
        return int(np.count_nonzero(self.holders[[*{*blocks}]] == 0))

    @property
    def num_shared(self) -> int:
        return int(self.counts[2])

    def check(self) -> None:
        """Recompute every count; raises InvariantViolation with both numbers."""
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
        owned = np.flatnonzero((self.holders == 0) & (self.owner > 0))
        if len(owned):
            b = int(owned[0])
            raise InvariantViolation("I2", f"owner[{b}] = {self.owner[b]}, but no request holds it")
        wrong = np.flatnonzero(_usage(self.holders) != self.usage)
        if len(wrong):
            b = int(wrong[0])
            raise InvariantViolation(
                "I2", f"usage[{b}] = {self.usage[b]}, but {self.holders[b]} requests hold it"
            )
        for name, counted in (
            ("num_used", int(np.count_nonzero(self.holders))),
            ("num_live", int(live.sum())),
            ("num_shared", int(np.count_nonzero(self.holders > 1))),
        ):
            if counted != getattr(self, name):
                raise InvariantViolation("I2", f"{name} = {getattr(self, name)}, counted {counted}")


def _usage(holders: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """The flags of blocks with these numbers of holders."""
    usage = (holders > 0).view(np.uint8) * np.uint8(FLAG_USED)
    usage |= (holders > 1).view(np.uint8) * np.uint8(FLAG_SHARED)
    return usage
