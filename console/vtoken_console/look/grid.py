"""Where blocks lie on the screen: cells in rows, at four depths of zoom.

Knows neither blocks' contents nor widgets. Needs no numpy, so that the first frame may ask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


class Zoom(IntEnum):
    """How near: the pool as a whole, a part of it, a cell of figures for each block.

    Behind BLOCKS come the slots, on a page of their own.
    """

    POOL = 0
    REGION = 1
    BLOCKS = 2


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

    @property
    def cell_area(self) -> int:
        return self.cell_width * self.cell_height

    def cell_of_block(self, block: int) -> int:
        return block // self.per_cell

    def row_of_block(self, block: int) -> int:
        return block // self.per_cell // self.columns

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

    def blocks_of_rows(self, first: int, last: int) -> range:
        """The block ids of rows [first, last)."""
        per_row = self.columns * self.per_cell
        return range(min(first * per_row, self.num_blocks), min(last * per_row, self.num_blocks))


MAX_ASPECT = 4  # columns of a cell for each of its lines; 2 is a square on most screens


def fit_pool(
    num_blocks: int, width: int, height: int, *, min_cell_width: int = 1, text_columns: int = 1
) -> Grid:
    """The grid that shows all blocks in width x height with the fewest blocks a cell.

    A pool smaller than the widget gets the cells that cover most of it, of at most MAX_ASPECT
    columns and at least one column a line. Cells of `text_columns` or more come before larger ones.
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
    """One cell a block: its live count and one mark; as many rows as it takes."""
    cell_width = text_width(block_size)
    return Grid(max(num_blocks, 1), 1, max(1, width // cell_width), cell_width, 1)


def fit_region(
    num_blocks: int, width: int, height: int, block_size: int, *, min_cell_width: int = 1
) -> Grid:
    """Halfway, by area, between the whole pool and the single blocks; with marks where one fits."""
    pool = fit_pool(num_blocks, width, height, min_cell_width=min_cell_width)
    blocks = fit_blocks(num_blocks, width, block_size)
    in_sight = max(1, blocks.columns * max(height, 1))
    wanted = math.sqrt(max(num_blocks, 1) * in_sight)
    columns = max(1, width // min_cell_width)
    per_cell = max(1, round(wanted / (columns * max(height, 1))))
    if per_cell >= pool.per_cell:
        return Grid(pool.num_blocks, 1, max(1, width // 2), 2, 1)
    if per_cell == 1:
        return Grid(pool.num_blocks, 1, max(1, width // 2), 2, 1)
    return Grid(pool.num_blocks, per_cell, columns, min_cell_width, 1)


def text_width(block_size: int) -> int:
    """Columns of a cell with its live count, one mark and a gap."""
    return len(str(block_size)) + 2


def has_ids(grid: Grid, block_size: int) -> bool:
    """Whether a cell has room for its block's id on a line above its live count."""
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
    """The grid of one depth of zoom in a widget of width x height."""
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
    """One step nearer; None where the next are the slots. A step that shows no more is left out."""
    if zoom is Zoom.POOL:
        if pool.per_cell > 1:
            return Zoom.REGION
        if pool.cell_width < text_width(block_size):
            return Zoom.BLOCKS
        return None
    return Zoom.BLOCKS if zoom is Zoom.REGION else None


def last_zoom(zoom: Zoom, pool: Grid) -> Zoom:
    """One step back; the pool stays where it is."""
    if zoom is Zoom.BLOCKS and pool.per_cell > 1:
        return Zoom.REGION
    return Zoom.POOL
