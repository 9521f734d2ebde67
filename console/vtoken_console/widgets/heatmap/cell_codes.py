"""A heatmap cell as one integer, so that rows are compared and drawn by value.

Knows neither colours nor widgets. C cells. Equal codes look alike under one `cell_paint.Looks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.wire import FLAG_HASHED, FLAG_IN_FLIGHT, FLAG_SHARED, FLAG_TAIL

# (first bit, bits) of every field
_FIELDS = {
    "mean": (0, 5),  # ramp level, FREE_LEVEL or DIM_LEVEL
    "worst": (5, 5),
    "mark": (10, 3),  # place in MARKS
    "move": (13, 2),  # 1 source, 2 destination, 3 both
    "phase": (15, 2),  # 0 just now, then fading
    "cursor": (17, 1),
    "kind": (18, 16),  # 0 mixed
    "kinds": (34, 4),  # how many kinds, MANY or more as MANY; 0: the cell tells an amount
    "live": (38, 16),  # live slots of a single block
}
MANY = 10
MARKS = " *sht"
_FLAG_MARKS = ((FLAG_TAIL, 4), (FLAG_HASHED, 3), (FLAG_SHARED, 2), (FLAG_IN_FLIGHT, 1))

Codes = npt.NDArray[np.uint64]


def _mark_table() -> npt.NDArray[np.uint8]:
    flags = np.arange(256)
    table = np.zeros(256, np.uint8)
    for bit, mark in _FLAG_MARKS:
        table[flags & bit != 0] = mark
    return table


_MARK_OF = _mark_table()


def mark_of(flags: Any) -> Any:
    """The place in MARKS of the flag that matters most, of each of `flags` [C]."""
    return _MARK_OF[flags]


def pack(num_cells: int, **fields: Any) -> Codes:
    """Codes [C] of fields [C] or scalars; what is not given is 0."""
    out = np.zeros(num_cells, np.uint64)
    for name, values in fields.items():
        first, bits = _FIELDS[name]
        limit = (1 << bits) - 1
        part = np.minimum(np.asarray(values).astype(np.uint64), np.uint64(limit))
        out |= part << np.uint64(first)
    return out


@dataclass(frozen=True, slots=True)
class Cell:
    """One code, taken apart."""

    mean: int = 0
    worst: int = 0
    mark: int = 0
    move: int = 0
    phase: int = 0
    cursor: int = 0
    kind: int = 0
    kinds: int = 0
    live: int = 0


def unpack(code: int) -> Cell:
    """The fields of one code."""
    return Cell(**{n: code >> first & (1 << bits) - 1 for n, (first, bits) in _FIELDS.items()})
