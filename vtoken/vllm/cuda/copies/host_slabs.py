"""Memory of the host by host slot: a row a slot, which has one token's K and V of all layers.

It is taken in slabs, in the order of host slots, when a slot is first used, and is page-locked
where a device copies to it. The slabs' first slots ascend; a slab ends where the next one begins.
Of slots in one slab that follow one another, the rows are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vtoken.base.arrays import Ints

MAX_BYTES = 16 << 20  # of a slab; torch rounds page-locked memory up to a power of two


class HostSlabs:
    """Rows of `row` numbers of `dtype`; `pinned`: page-locked."""

    def __init__(self, row: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._row, self._dtype, self._pinned = row, dtype, pinned
        self._max_rows = max(1, MAX_BYTES // (row * dtype.itemsize))
        self._capacity = 0
        self._slabs: list[torch.Tensor] = []
        self._bounds: Ints = np.zeros(1, dtype=np.int64)  # first slots, and the end of the last

    def __len__(self) -> int:
        """The host slots that have memory: all below it."""
        return int(self._bounds[-1])

    def reserve(self, num_slots: int) -> None:
        """Take memory for all host slots below `num_slots`; of a slab, no more than the limit.

        Raises what torch raises if the host refuses it; then nothing is taken.
        """
        taken: list[torch.Tensor] = []
        end = len(self)
        while end < num_slots:
            rows = min(self._max_rows, max(num_slots, self._capacity) - end)
            shape = (rows, self._row)
            taken.append(torch.empty(shape, dtype=self._dtype, pin_memory=self._pinned))
            end += rows
        self._keep([*self._slabs, *taken])

    def limit(self, capacity: int) -> bool:
        """Give up slabs of host slots from `capacity` on alone; whether there were any.

        torch keeps the memory of copies that are still running.
        """
        if capacity == self._capacity:
            return False
        self._capacity = capacity
        num_kept = int(np.searchsorted(self._bounds[:-1], capacity))
        gives = num_kept < len(self._slabs)
        self._keep(self._slabs[:num_kept])
        return gives

    def _keep(self, slabs: list[torch.Tensor]) -> None:
        self._slabs = slabs
        self._bounds = np.cumsum([0, *map(len, slabs)], dtype=np.int64)

    def check(self, hosts: Ints) -> None:
        """Raises IndexError unless all `hosts` [k] have memory."""
        if not 0 <= hosts.min() <= hosts.max() < len(self):
            raise IndexError(f"host slots {hosts.min()} to {hosts.max()}, {len(self)} have memory")

    def runs(self, hosts: Ints) -> Iterator[tuple[int, torch.Tensor]]:
        """The memory of host slots `hosts` [k], ascending, as few contiguous parts [n, row]: each
        with the index in `hosts` of its first slot.
        """
        slabs = np.searchsorted(self._bounds, hosts, side="right") - 1
        breaks = np.flatnonzero((np.diff(hosts) != 1) | (np.diff(slabs) != 0)) + 1
        starts = [0, *breaks.tolist()]
        for start, end in zip(starts, [*starts[1:], len(hosts)], strict=True):
            slab = int(slabs[start])
            row = int(hosts[start] - self._bounds[slab])
            yield start, self._slabs[slab][row : row + end - start]
