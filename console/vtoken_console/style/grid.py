"""The layout of the heatmap: blocks to cells in rows, at three zoom levels.

Does not import numpy, so the first frame can use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


class Zoom(IntEnum):
    """The zoom level: the entire pool, a part of it, or one cell with numbers for each block.

    The slots of a block are on a separate page.
    """

    POOL = 0
    REGION = 1
    BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows of C cells, each `cell_width` columns x `cell_height` lines."""

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

    @property
    def cell_area(self) -> int:
        return self.cell_width * self.cell_height

    def cell_of_block(self, block: int) -> int:
        return block // self.per_cell

    def row_of_block(self, block: int) -> int:
        return block // self.per_cell // self.columns

    def cell_at(self, x: int, y: int) -> int | None:
        """The cell at column x, line y; None outside the map."""
        column, row = x // self.cell_width, y // self.cell_height
        cell = row * self.columns + column
        if x < 0 or y < 0 or column >= self.columns or cell >= self.num_cells:
            return None
        return cell

    def blocks_of(self, cell: int) -> range:
        """The block ids of `cell`."""
        first = cell * self.per_cell
        return range(first, min(first + self.per_cell, self.num_blocks))

    def blocks_of_rows(self, first: int, last: int) -> range:
        """The block ids of rows [first, last)."""
        per_row = self.columns * self.per_cell
        return range(min(first * per_row, self.num_blocks), min(last * per_row, self.num_blocks))


MAX_ASPECT = 4  # columns per line of a cell; 2 is a square on most screens


def fit_pool(
    num_blocks: int, width: int, height: int, *, min_cell_width: int = 1, text_columns: int = 1
) -> Grid:
    """The grid that shows all blocks in width x height with the fewest blocks per cell.

    A pool smaller than the widget gets the largest cells that fit, with 1 to MAX_ASPECT columns per
    line. A cell of at least `text_columns` is preferred to a larger one without.
    """
    width, height = max(width, min_cell_width), max(height, 1)
    num_blocks = max(num_blocks, 1)
    columns = width // min_cell_width
    per_cell = -(-num_blocks // (columns * height))
    best = Grid(num_blocks, per_cell, columns, min_cell_width, 1)
    if per_cell > 1:
        return best
    for cell_height in range(1, height + 1):
        columns = -(-num_blocks // (height // cell_height))
        cell_width = min(width // columns, MAX_ASPECT * cell_height)
        if cell_width < max(min_cell_width, cell_height):
            continue
        grid = Grid(num_blocks, 1, width // cell_width, cell_width, cell_height)
        best = max(best, grid, key=lambda g: (g.cell_width >= text_columns, g.cell_area))
    return best


def fit_blocks(num_blocks: int, width: int, block_size: int) -> Grid:
    """One cell per block, with its live count and one mark; as many rows as needed."""
    cell_width = text_width(block_size)
    return Grid(max(num_blocks, 1), 1, max(1, width // cell_width), cell_width, 1)


def fit_region(
    num_blocks: int, width: int, height: int, block_size: int, *, min_cell_width: int = 1
) -> Grid:
    """Halfway, by area, between the pool and single blocks; with marks if a cell is one block."""
    pool = fit_pool(num_blocks, width, height, min_cell_width=min_cell_width)
    blocks = fit_blocks(num_blocks, width, block_size)
    in_sight = max(1, blocks.columns * max(height, 1))
    wanted = math.sqrt(max(num_blocks, 1) * in_sight)
    columns = max(1, width // min_cell_width)
    per_cell = max(1, round(wanted / (columns * max(height, 1))))
    if per_cell == 1 or per_cell >= pool.per_cell:
        return Grid(pool.num_blocks, 1, max(1, width // 2), 2, 1)
    return Grid(pool.num_blocks, per_cell, columns, min_cell_width, 1)


def text_width(block_size: int) -> int:
    """Columns of a cell with a live count, one mark and a gap."""
    return len(str(block_size)) + 2


def has_ids(grid: Grid, block_size: int) -> bool:
    """Whether a cell fits its block's id on a line above its live count."""
    columns = max(text_width(block_size), text_width(grid.num_blocks - 1))
    return grid.per_cell == 1 and grid.cell_height > 1 and grid.cell_width >= columns


def fit(
    zoom: Zoom,
    num_blocks: int,
    width: int,
    height: int,
    block_size: int,
    *,
    min_cell_width: int = 1,
) -> Grid:
    """The grid of one zoom level in a widget of width x height."""
    if zoom is Zoom.BLOCKS:
        return fit_blocks(num_blocks, width, block_size)
    if zoom is Zoom.REGION:
        return fit_region(num_blocks, width, height, block_size, min_cell_width=min_cell_width)
    return fit_pool(
        num_blocks,
        width,
        height,
        min_cell_width=min_cell_width,
        text_columns=text_width(block_size),
    )


def next_zoom(zoom: Zoom, pool: Grid, block_size: int) -> Zoom | None:
    """The next zoom level that shows more; None if the next is a block's slots."""
    if zoom is Zoom.POOL:
        if pool.per_cell > 1:
            return Zoom.REGION
        if pool.cell_width < text_width(block_size):
            return Zoom.BLOCKS
        return None
    return Zoom.BLOCKS if zoom is Zoom.REGION else None


def previous_zoom(zoom: Zoom, pool: Grid) -> Zoom:
    """The previous zoom level; POOL for POOL."""
    if zoom is Zoom.BLOCKS and pool.per_cell > 1:
        return Zoom.REGION
    return Zoom.POOL
