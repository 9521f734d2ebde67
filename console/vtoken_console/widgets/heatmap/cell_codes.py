"""Packs a heatmap cell into one integer, so that rows can be compared and cached.

C cells. Cells with equal codes look the same under one `cell_paint.CellPainter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.wire import FLAG_HASHED, FLAG_IN_FLIGHT, FLAG_SHARED, FLAG_TAIL

# (first bit, bits) of every field
_FIELDS = {
    "mean": (0, 5),  # ramp level, FREE_LEVEL, DIM_LEVEL or OTHER_LEVEL
    "worst": (5, 5),
    "mark": (10, 3),  # index in MARKS
    "move": (13, 2),  # 1 source, 2 destination, 3 both
    "phase": (15, 2),  # 0 just now, then fading
    "cursor": (17, 1),
    "kind": (18, 16),  # 0 mixed
    "kinds": (34, 4),  # number of kinds, at most MANY; 0: the cell shows an amount
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
    """The index in MARKS of the most important flag in each of `flags` [C]."""
    return _MARK_OF[flags]


def pack(num_cells: int, **fields: Any) -> Codes:
    """Codes [C] of fields [C] or scalars; missing fields are 0."""
    out = np.zeros(num_cells, np.uint64)
    for name, values in fields.items():
        first, bits = _FIELDS[name]
        limit = (1 << bits) - 1
        part = np.minimum(np.asarray(values).astype(np.uint64), np.uint64(limit))
        out |= part << np.uint64(first)
    return out


@dataclass(frozen=True, slots=True)
class Cell:
    """The fields of one code."""

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
