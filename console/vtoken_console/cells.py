"""Blocks to cells: the mean and the worst of what a cell of the heatmap stands for.

Knows neither colours nor widgets. N blocks, C cells, S block size. Free blocks count in neither
figure; a cell that holds none but free blocks has no mean and no worst (NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.wire import FLAG_USED
from vtoken_console.ramp import LEVELS

FREE_LEVEL = LEVELS  # the level of a cell that holds free blocks only

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """How C cells of `cell_width` x `cell_height` columns and lines fill a widget, row by row."""

    num_blocks: int
    per_cell: int
    columns: int
    cell_width: int = 1
    cell_height: int = 1

    @property
    def num_cells(self) -> int:
        return -(-self.num_blocks // self.per_cell)

    @property
    def rows(self) -> int:
        return -(-self.num_cells // self.columns)

    @property
    def lines(self) -> int:
        return self.rows * self.cell_height

    def cell_of_block(self, block: int) -> int:
        return block // self.per_cell

    def cell_at(self, x: int, y: int) -> int | None:
        """The cell under column x, line y, or None outside the map."""
        column, row = x // self.cell_width, y // self.cell_height
        cell = row * self.columns + column
        if x < 0 or y < 0 or column >= self.columns or cell >= self.num_cells:
            return None
        return cell

    def blocks_of(self, cell: int) -> range:
        """The block ids that `cell` stands for."""
        first = cell * self.per_cell
        return range(first, min(first + self.per_cell, self.num_blocks))


def fit_pool(num_blocks: int, width: int, height: int, *, min_cell_width: int = 1) -> Grid:
    """The grid that shows all blocks in width x height with the fewest blocks a cell.

    A pool smaller than the widget gets larger cells, up to 8 x 3, about square on the screen.
    """
    width, height = max(width, min_cell_width), max(height, 1)
    num_blocks = max(num_blocks, 1)
    columns = width // min_cell_width
    per_cell = -(-num_blocks // (columns * height))
    best = Grid(num_blocks, per_cell, columns, min_cell_width, 1)
    if per_cell > 1:
        return best
    for cell_width, cell_height in ((2, 1), (3, 1), (4, 2), (6, 2), (6, 3), (8, 3)):
        if cell_width < min_cell_width or cell_width > width:
            continue
        grid = Grid(num_blocks, 1, width // cell_width, cell_width, cell_height)
        if grid.lines <= height:
            best = grid
    return best


def fit_blocks(num_blocks: int, width: int, block_size: int) -> Grid:
    """One cell a block: its live count and one mark; as many rows as it takes."""
    cell_width = len(str(block_size)) + 2
    return Grid(max(num_blocks, 1), 1, max(1, width // cell_width), cell_width, 1)


@dataclass(frozen=True, slots=True)
class Cells:
    """Per cell [C]: mean and worst live share of its used blocks (NaN: none), used blocks, flags.

    `flags` is the union of the blocks' flags.
    """

    mean: F32
    worst: F32
    num_used: Ints
    flags: U8


def summarize(live: U16, flags: U8, block_size: int, per_cell: int) -> Cells:
    """Mean, worst, used count and flag union of every cell of `per_cell` blocks.

    `live` [N], `flags` [N] -> Cells [ceil(N / per_cell)].
    """
    pad = -len(live) % per_cell
    used = (flags & FLAG_USED) != 0
    share = live.astype(np.float32) / np.float32(max(block_size, 1))
    np.minimum(share, 1, out=share)
    total = np.where(used, share, np.float32(0))
    least = np.where(used, share, np.float32(np.inf))
    if pad:
        total = np.concatenate([total, np.zeros(pad, np.float32)])
        least = np.concatenate([least, np.full(pad, np.inf, np.float32)])
        used = np.concatenate([used, np.zeros(pad, bool)])
        flags = np.concatenate([flags, np.zeros(pad, np.uint8)])
    num_used = used.reshape(-1, per_cell).sum(axis=1)
    empty = num_used == 0
    mean = total.reshape(-1, per_cell).sum(axis=1) / np.maximum(num_used, 1)
    mean = mean.astype(np.float32)
    worst = least.reshape(-1, per_cell).min(axis=1)
    mean[empty] = np.nan
    worst[empty] = np.nan
    union = np.bitwise_or.reduce(flags.reshape(-1, per_cell), axis=1)
    return Cells(mean, worst, num_used, union)


def levels(share: F32) -> U8:
    """Ramp level of each share [C]; FREE_LEVEL where NaN. The ends are exact (see `ramp`)."""
    empty = np.isnan(share)
    filled = np.where(empty, 0, share)
    out: U8 = np.clip(np.rint(filled * (LEVELS - 1)), 1, LEVELS - 2).astype(np.uint8)
    out[filled <= 0] = 0
    out[filled >= 1] = LEVELS - 1
    out[empty] = FREE_LEVEL
    return out
