"""Rows of facts: one record per row, in an array that grows; rows are reused.

Independent of tokens and requests. A subclass annotates its fields with `Ints` or `Bools`; each is
an attribute, an array by row. The arrays are replaced when they grow: read them anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MIN_ROWS = 8
TYPES = {"Ints": np.int64, "Bools": np.bool_}  # of a field, by its annotation


class Rows:
    """One record per row in `facts` and, over the same memory, in `records`, for kernels.

    A kernel gets `records` inside a named tuple: Numba takes 3 µs to recognise it alone, and 0.5 µs
    as a field.
    """

    _record: np.dtype[Any]

    def __init_subclass__(cls) -> None:
        fields = [(name, TYPES[of]) for name, of in cls.__annotations__.items() if of in TYPES]
        cls._record = np.dtype(fields, align=True)

    def __init__(self, *, unused: int = 0) -> None:
        self.num_rows = 0  # ever taken
        self._unused = unused  # every field of a row that nobody uses
        self._free: list[int] = []
        self._set(np.full(MIN_ROWS, unused, dtype=self._record))

    def _set(self, facts: npt.NDArray[Any]) -> None:
        self.facts = facts
        self.records = facts.view(np.recarray)
        for name in facts.dtype.names or ():
            setattr(self, name, facts[name])

    def take(self) -> int:
        """Allocate an unused row."""
        if self._free:
            return self._free.pop()
        self.num_rows += 1
        self.extend(self.num_rows)
        return self.num_rows - 1

    def give_back(self, row: int) -> None:
        """Let the row be reused."""
        self.clear(row)
        self._free.append(row)

    def clear(self, row: int) -> None:
        """Set every field of a row that nobody uses any more."""
        self.facts[row] = self._unused

    def extend(self, num_rows: int) -> None:
        """Ensure that there are this many rows."""
        known = len(self.facts)
        if num_rows > known:
            grown = np.full(max(num_rows, 2 * known), self._unused, dtype=self.facts.dtype)
            grown[:known] = self.facts
            self._set(grown)
