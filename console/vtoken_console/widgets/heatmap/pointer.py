"""The heatmap's cursor and scroll position, moved by keys and mouse.

The cursor is a block and stays on it at every zoom level.
"""

from __future__ import annotations

from textual import events
from textual.message import Message

from vtoken_console.style.grid import Grid, Zoom
from vtoken_console.widgets.lines import LinesWidget


class Pointer(LinesWidget):
    class ZoomRequested(Message):
        """A double click on a cell, or the wheel turned to zoom in."""

        def __init__(self, *, slots: bool) -> None:
            super().__init__()
            self.slots = slots  # whether to open a block's slots at the last level

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.cursor = -1  # block id; -1: not placed yet
        self.zoom = Zoom.POOL
        self.top = 0  # first visible row
        self.grid: Grid | None = None
        self.pool: Grid | None = None  # the grid of the entire pool at this size
        self._line: int | None = None  # line of the screen to keep the cursor on

    @property
    def foot(self) -> int:
        return 0

    # ------------------------------------------------------------ scrolling

    def keep_row(self) -> None:
        """Keeps the cursor's cell on its line of the screen in the next drawing."""
        if self.grid is not None:
            row = self.grid.row_of_block(self.cursor) - self.top
            self._line = row * self.grid.cell_height

    def scroll_to_cursor(self, room: int) -> None:
        """Sets the first row so that the cursor is visible in `room` lines."""
        grid = self.grid
        if grid is None:
            return
        rows = max(1, room // grid.cell_height)
        row = grid.row_of_block(self.cursor)
        if self._line is not None:
            self.top, self._line = row - self._line // grid.cell_height, None
        self.top = max(row - rows + 1, min(self.top, row, max(0, grid.rows - rows)), 0)

    def scroll_rows(self, by: int) -> None:
        """Scrolls by rows; the cursor keeps its line of the screen."""
        self.keep_row()
        self.action_move(0, by)

    # ------------------------------------------------------------ keys

    def action_move(self, dx: int, dy: int) -> None:
        grid = self.grid
        if grid is None:
            return
        cell = grid.cell_of_block(self.cursor) + dx + dy * grid.columns
        if 0 <= cell < grid.num_cells:
            self.cursor = grid.blocks_of(cell)[0]
            self.redraw()

    def action_page(self, by: int) -> None:
        grid = self.grid
        if grid is not None:
            rows = max(1, (self.content_size.height - self.foot) // grid.cell_height)
            cell = grid.cell_of_block(self.cursor) + by * rows * grid.columns
            self.cursor = grid.blocks_of(max(0, min(cell, grid.num_cells - 1)))[0]
            self.redraw()

    def action_jump(self, to: int) -> None:
        if self.grid is not None:
            self.cursor = 0 if to == 0 else self.grid.num_blocks - 1
            self.redraw()

    # ------------------------------------------------------------ pointer

    def _block_at(self, event: events.MouseEvent) -> int | None:
        place, grid = event.get_content_offset(self), self.grid
        if place is None or grid is None or place.y >= self.content_size.height - self.foot:
            return None
        cell = grid.cell_at(place.x, place.y + self.top * grid.cell_height)
        return None if cell is None else grid.blocks_of(cell)[0]

    def _point(self, event: events.MouseEvent) -> bool:
        """Moves the cursor to the pointer; False outside the map."""
        block, grid = self._block_at(event), self.grid
        if block is None or grid is None:
            return False
        if grid.cell_of_block(block) != grid.cell_of_block(self.cursor):
            self.cursor = block
            self.redraw()
        return True

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point(event)

    def on_click(self, event: events.Click) -> None:
        if self._point(event) and event.chain == 2:
            self.post_message(self.ZoomRequested(slots=True))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        if event.shift or event.ctrl:
            self.scroll_rows(-1)
        elif self._point(event):
            self.post_message(self.ZoomRequested(slots=False))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        if event.shift or event.ctrl:
            self.scroll_rows(1)
        else:
            self._point(event)
            self.zoom_out()

    def zoom_out(self) -> None:
        raise NotImplementedError
