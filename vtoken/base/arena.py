"""A growable arena: a few flat arrays in which every row owns one contiguous segment.

Independent of tokens and requests. The arena's owner stores `first` and `capacity` by row for its
kernels. Row r owns entries first[r] .. first[r] + capacity[r], none while capacity[r] = 0. A
segment that grows moves to the end; abandoned entries are reclaimed when the arena is full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints

GROWTH = 8  # the arrays grow by 1 / GROWTH at least


class Column(NamedTuple):
    """An array of `width` elements per entry, or one per `group` entries; `fill`: initial value."""

    dtype: type[np.generic]
    fill: int = 0
    width: int = 1
    group: int = 1

    def part(self, start: int, stop: int) -> slice:
        """The elements of entries start .. stop, which are multiples of `group`."""
        return slice(start * self.width // self.group, stop * self.width // self.group)

    def make(self, size: int) -> npt.NDArray[Any]:
        return np.full(size * self.width // self.group, self.fill, dtype=self.dtype)


class Arena:
    """One array per column in `arrays`. `reserve` and `compact` replace them: read them anew."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._end = 0
        self._unit = max(column.group for column in columns)
        self.size = 0
        self.arrays = [column.make(0) for column in columns]

    def reserve(self, first: Ints, capacity: Ints, row: int, used: int, wanted: int) -> None:
        """Move `row` to a segment of `wanted` entries and copy its first `used` entries there."""
        if self._end + wanted > self.size:
            self.compact(first, capacity, wanted)
        old, start = int(first[row]), self._end
        for column, array in zip(self._columns, self.arrays, strict=True):
            array[column.part(start, start + used)] = array[column.part(old, old + used)]
            array[column.part(start + used, start + wanted)] = column.fill
        first[row], capacity[row] = start, wanted
        self._end = start + wanted

    def compact(self, first: Ints, capacity: Ints, more: int, *, shrink: bool = False) -> None:
        """Move all segments to the front, followed by at least `more` free entries.

        `shrink`: the arrays may become smaller.
        """
        total = int(capacity.sum()) + more
        size = total + total // GROWTH // self._unit * self._unit
        self.size = size if shrink else max(size, self.size)
        before, self.arrays = self.arrays, [column.make(self.size) for column in self._columns]
        self._end = 0
        for row in np.flatnonzero(capacity).tolist():
            old, count = int(first[row]), int(capacity[row])
            for column, source, array in zip(self._columns, before, self.arrays, strict=True):
                to = column.part(self._end, self._end + count)
                array[to] = source[column.part(old, old + count)]
            first[row] = self._end
            self._end += count
