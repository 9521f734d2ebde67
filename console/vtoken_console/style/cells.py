"""Reduces blocks to the cells of the heatmap: the mean and the worst share of each cell.

N blocks, C cells, S block size. Blocks that are not counted (free, or hidden by a filter) enter
neither value. A cell without counted blocks has NaN for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken import wire
from vtoken_console.style.ramp import FREE_LEVEL, LEVELS

MIXED = 0  # the kind of a cell whose blocks are of several kinds

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cells:
    """Per cell [C], over its counted blocks: mean and worst share (NaN: none), their number, and
    the union of their flags.
    """

    mean: F32
    worst: F32
    num_used: Ints
    flags: U8


def _rows(values: npt.NDArray[np.generic], per_cell: int, fill: float) -> npt.NDArray[np.generic]:
    """`values` [N] as [C, per_cell]; `fill` pads the last row."""
    pad = -len(values) % per_cell
    if pad:
        values = np.concatenate([values, np.full(pad, fill, values.dtype)])
    return values.reshape(-1, per_cell)


def reduce_cells(share: F32, flags: U8, counted: Mask, per_cell: int) -> Cells:
    """Mean and least `share` (0..1) over the `counted` blocks of every cell."""
    kept = np.where(counted, flags, np.uint8(0))
    if per_cell == 1:
        alone = np.where(counted, share, np.float32(np.nan))
        return Cells(alone, alone, counted.astype(np.int64), kept)
    num = _rows(counted, per_cell, 0).sum(axis=1)
    total = _rows(np.where(counted, share, np.float32(0)), per_cell, 0).sum(axis=1)
    most = np.float32(np.inf)
    worst = _rows(np.where(counted, share, most), per_cell, float(most)).min(axis=1)
    empty = num == 0
    mean = (total / np.maximum(num, 1)).astype(np.float32)
    mean[empty] = np.nan
    worst[empty] = np.nan
    union = np.bitwise_or.reduce(_rows(kept, per_cell, 0), axis=1)
    return Cells(mean, worst, num, union)


def live_share(live: U16, block_size: int) -> F32:
    """The share of live slots, 0..1 [N]."""
    share = live.astype(np.float32) / np.float32(max(block_size, 1))
    np.minimum(share, 1, out=share)
    return share


def summarize(live: U16, flags: U8, block_size: int, per_cell: int) -> Cells:
    """Mean, worst, used count and flag union of every cell of `per_cell` blocks.

    `live` [N], `flags` [N] -> Cells [ceil(N / per_cell)].
    """
    used = (flags & wire.FLAG_USED) != 0
    return reduce_cells(live_share(live, block_size), flags, used, per_cell)


def count_cells(counted: Mask, per_cell: int) -> Ints:
    """The number of counted blocks in every cell [C]."""
    number: Ints = _rows(counted, per_cell, 0).sum(axis=1)
    return number


def peak_cells(values: F32, per_cell: int) -> F32:
    """The maximum of `values` (>= 0) in every cell [C]."""
    peak: F32 = _rows(values, per_cell, 0).max(axis=1)
    return peak


def kinds(kind: U16, counted: Mask, per_cell: int) -> tuple[U16, Ints]:
    """Per cell [C]: the kind of all counted blocks, else MIXED; and the number of kinds.

    `kind` [N] is 1 or more.
    """
    shown = np.where(counted, kind, np.uint16(0))
    if per_cell == 1:
        return shown, counted.astype(np.int64)
    ordered = np.sort(_rows(shown, per_cell, 0), axis=1)
    fresh = (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] != 0)
    number = fresh.sum(axis=1) + (ordered[:, 0] != 0)
    return np.where(number == 1, ordered[:, -1], np.uint16(MIXED)), number


def levels(share: F32) -> U8:
    """The ramp level of each share [C]; FREE_LEVEL for NaN."""
    empty = np.isnan(share)
    filled = np.clip(np.where(empty, 0, share), 0, 1)
    near = np.rint(filled * (LEVELS - 1))
    out: U8 = near.astype(np.uint8)
    np.clip(out, 1, LEVELS - 2, out=out)
    out[filled <= 0] = 0
    out[filled >= 1] = LEVELS - 1
    out[empty] = FREE_LEVEL
    return out


State = Callable[[U16, U8, int], Mask]  # of `live` [N], `flags` [N] and the block size: [N]


def _flagged(flag: int) -> State:
    return lambda _, flags, __: flags & flag != 0


def _used(condition: State) -> State:
    """Held by a request, and in this condition."""
    return lambda live, flags, size: (flags & wire.FLAG_USED != 0) & condition(live, flags, size)


STATES: dict[str, State] = {  # by the names of `words.BLOCK_STATES`
    "free": lambda _, flags, __: flags == 0,
    "live": _used(lambda live, *_: live > 0),
    # Some slot holds nothing live; the slots after a tail's last token do not count.
    "dead": _used(lambda live, flags, size: (live < size) & (flags & wire.FLAG_TAIL == 0)),
    # At most half live: a planning round empties these first.
    "low": _used(lambda live, _, size: live <= size // 2),
    "shared": _flagged(wire.FLAG_SHARED),
    "cached": _flagged(wire.FLAG_HASHED),
    "moving": _flagged(wire.FLAG_IN_FLIGHT),
    "filling": _flagged(wire.FLAG_TAIL),
    "other": _flagged(wire.FLAG_OTHER),
}
