"""Arrays that many rows share: one piece a row, all pieces in a few arrays behind each other.

Knows neither tokens nor requests. Whoever owns an arena keeps `first` and `room` by row, where its
kernels read them; row r has the places first[r] .. first[r] + room[r], and none while room[r] = 0.
A piece moves to the end when it grows. What it leaves behind is taken back when the end is reached.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Ints

GROWTH = 8  # the arrays grow by 1 / GROWTH at least


class Column(NamedTuple):
    """An array with `width` elements a place, or one for `share` places; `fill`: before use."""

    dtype: type[np.generic]
    fill: int = 0
    width: int = 1
    share: int = 1

    def part(self, start: int, stop: int) -> slice:
        """The elements of the places start .. stop, multiples of `share`."""
        return slice(start * self.width // self.share, stop * self.width // self.share)

    def make(self, size: int) -> npt.NDArray[Any]:
        return np.full(size * self.width // self.share, self.fill, dtype=self.dtype)


class Arena:
    """`arrays`, one a column, are replaced when the pieces are packed: fetch them anew."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._end = 0
        self._unit = max(column.share for column in columns)
        self.size = 0
        self.arrays = [column.make(0) for column in columns]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def reserve(self, first: Ints, room: Ints, row: int, used: int, wanted: int) -> None:
        """Move `row` to a piece of `wanted` places; the first `used` keep what they hold."""
        if self._end + wanted > self.size:
            self.pack(first, room, wanted)
        old, start = int(first[row]), self._end
        for column, array in zip(self._columns, self.arrays, strict=True):
            array[column.part(start, start + used)] = array[column.part(old, old + used)]
            array[column.part(start + used, start + wanted)] = column.fill
        first[row], room[row] = start, wanted
        self._end = start + wanted

    def pack(self, first: Ints, room: Ints, more: int, *, shrink: bool = False) -> None:
        """Put all pieces behind each other, with places for `more` behind them and some beyond.

        `shrink`: the arrays may become smaller.
        """
        total = int(room.sum()) + more
        size = total + total // GROWTH // self._unit * self._unit
        self.size = size if shrink else max(size, self.size)
        before, self.arrays = self.arrays, [column.make(self.size) for column in self._columns]
        self._end = 0
        for row in np.flatnonzero(room).tolist():
            old, count = int(first[row]), int(room[row])
            for column, source, array in zip(self._columns, before, self.arrays, strict=True):
                to = column.part(self._end, self._end + count)
                array[to] = source[column.part(old, old + count)]
            first[row] = self._end
            self._end += count
