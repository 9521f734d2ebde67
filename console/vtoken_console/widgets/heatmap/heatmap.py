"""The heatmap of all blocks: the pool, a part of it, or a number for each block.

A cell shows its mean and its worst block. A frame costs a few passes over arrays and the rows whose
cells changed. numpy is imported with the first data, to keep the first frame fast. The cursor is a
block and stays on it at every zoom level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual import events
from textual.message import Message

from vtoken_console.frame.view import View
from vtoken_console.style.grid import Grid, Zoom, fit, has_ids, next_zoom, previous_zoom, text_width
from vtoken_console.style.ramp import FREE_LEVEL, OTHER_LEVEL
from vtoken_console.widgets.cursor import CursorWidget
from vtoken_console.widgets.heatmap.colouring import Mode
from vtoken_console.widgets.lines import EMPTY, Line

if TYPE_CHECKING:
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.activity import Activity
    from vtoken_console.widgets.heatmap.cell_paint import CellPainter


LEGEND_FROM = 12  # lines


class Heatmap(CursorWidget):
    class ZoomRequested(Message):
        """A double click on a cell, or the wheel turned to zoom in."""

        def __init__(self, *, slots: bool) -> None:
            super().__init__()
            self.slots = slots  # whether to open a block's slots at the last level

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.mode = Mode.UTILISATION
        self.cursor = -1  # block id; -1: not placed yet
        self.zoom = Zoom.POOL
        self.top = 0  # first visible row
        self.grid: Grid | None = None
        self.pool: Grid | None = None  # the grid of the entire pool at this size
        self._line: int | None = None  # line of the screen to keep the cursor on
        self.matching: int | None = None  # blocks that match the filter; None: no filter
        self._painter: CellPainter | None = None
        self._painter_key: tuple[Any, ...] = ()
        self._rows: dict[int, tuple[bytes, list[Line]]] = {}

    # ------------------------------------------------------------ drawing

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        model, activity = view.model, view.activity
        if model is None or activity is None or not model.num_blocks:
            return []
        room = height - self.foot
        if room < 1:
            return []
        from vtoken.wire import FLAG_USED
        from vtoken_console.widgets.heatmap import text

        narrowest = 1 if view.ramp.colors else 2
        size = model.block_size
        grid = fit(self.zoom, model.num_blocks, width, room, size, min_cell_width=narrowest)
        self.grid = grid
        self.pool = fit(Zoom.POOL, model.num_blocks, width, room, size, min_cell_width=narrowest)
        if self.cursor < 0:
            self.cursor = int((model.flags & FLAG_USED != 0).argmax())
        self.cursor = min(self.cursor, model.num_blocks - 1)
        self.scroll_to_cursor(room)
        mode = self.mode_shown(model)
        codes = self._codes(view, model, activity, mode, room)
        lines = self._paint(view, mode, codes, room)
        lines += [EMPTY] * (room - len(lines))
        shown = text.Shown(grid, self.zoom, self.mode, self.matching, self.top, self.cursor)
        title, place = text.title(shown, view, model), ""
        if self.zoom is not Zoom.POOL:
            lines.append(text.overview(shown, view, model, width, room))
        cursor = text.under_cursor(shown, model, activity, width)
        if self._has_legend:
            lines.append(text.legend(view, mode, width, single=self._is_text(size)))
            lines.append(cursor)
        elif self.has_focus:
            place = "".join(part for part, _ in cursor).strip()
        self.set_titles(title, place)
        return lines

    @property
    def _has_legend(self) -> bool:
        """Whether there is room for it; in a low map the lower border tells what the cursor is on,
        and the help page has the legend.
        """
        return self.content_size.height >= LEGEND_FROM

    @property
    def foot(self) -> int:
        """Lines below the map: legend and cursor, and, when zoomed in, the overview."""
        return 2 * self._has_legend + (self.zoom is not Zoom.POOL)

    def mode_shown(self, model: StreamState) -> Mode:
        """The mode in force; utilisation instead of owner if the server reports no owners."""
        if self.mode is Mode.OWNER and not len(model.owner):
            return Mode.UTILISATION
        return self.mode

    def _is_text(self, block_size: int) -> bool:
        grid = self.grid
        return grid is not None and grid.per_cell == 1 and grid.cell_width >= text_width(block_size)

    def _codes(
        self, view: View, model: StreamState, activity: Activity, mode: Mode, room: int
    ) -> Any:
        """Codes of the visible cells [C]."""
        import numpy as np

        from vtoken.wire import FLAG_OTHER, FLAG_USED
        from vtoken_console.frame import filters
        from vtoken_console.style import cells
        from vtoken_console.widgets.heatmap import cell_paint, colouring

        grid = self.grid
        assert grid is not None
        last_row = min(grid.rows, self.top + max(1, room // grid.cell_height))
        blocks = grid.blocks_of_rows(self.top, last_row)
        part = slice(blocks.start, blocks.stop)
        flags = model.flags[part]
        counted = used = (flags & FLAG_USED) != 0
        fields: dict[str, Any] = {}
        self.matching = None
        if view.filter:
            mask = filters.block_mask(view.filter, model)
            self.matching = int(mask.sum())
            dim = cells.count_cells(mask[part], grid.per_cell) == 0
            # A cell shows the blocks that match; one that has none is dim, and shows all.
            counted = used & (mask[part] | np.repeat(dim, grid.per_cell)[: len(flags)])
            fields["dim"] = dim
        coloured = colouring.colour(mode, model, part)
        if coloured.share is not None:
            found = cells.reduce_cells(coloured.share, flags, counted, grid.per_cell)
            mean = cells.levels(found.mean)
            fields["worst"] = cells.levels(found.worst)
            if grid.per_cell == 1:
                fields["mark"] = cell_paint.mark_of(found.flags)
        else:
            assert coloured.kind is not None
            fields["kind"], number = cells.kinds(coloured.kind, counted, grid.per_cell)
            fields["kinds"] = number
            mean = np.where(number > 0, 0, FREE_LEVEL)
        others = cells.count_cells((flags & FLAG_OTHER) != 0, grid.per_cell) > 0
        mean = np.where((mean == FREE_LEVEL) & others, OTHER_LEVEL, mean)
        if self._is_text(model.block_size):
            fields["live"] = model.live[part]
        if activity.is_moving(view.monotonic) and view.motion:
            fields |= _moves(activity, view.monotonic, part, grid.per_cell)
        codes = cell_paint.pack(len(mean), mean=mean, **fields)
        at = grid.cell_of_block(self.cursor) - self.top * grid.columns
        if 0 <= at < len(codes):
            codes[at] |= cell_paint.pack(1, cursor=1)[0]
        return codes

    def _paint(self, view: View, mode: Mode, codes: Any, room: int) -> list[Line]:
        from vtoken_console.widgets.heatmap import cell_paint

        grid = self.grid
        assert grid is not None
        assert view.model is not None
        key = (view.theme, view.ramp, mode, grid, self.has_focus, view.ascii_only)
        if self._painter is None or key != self._painter_key:
            self._painter_key, self._rows = key, {}
            self._painter = cell_paint.CellPainter(
                view.theme,
                view.ramp,
                mode,
                grid.cell_width,
                grid.cell_height,
                self._is_text(view.model.block_size),
                has_ids(grid, view.model.block_size),
                self.has_focus,
                view.ascii_only,
            )
        lines: list[Line] = []
        rows: dict[int, tuple[bytes, list[Line]]] = {}
        for number, first in enumerate(range(0, len(codes), grid.columns), self.top):
            row = codes[first : first + grid.columns]
            row_bytes = row.tobytes()
            cached = self._rows.get(number)
            if cached is None or cached[0] != row_bytes:
                values = row.tolist()
                block = number * grid.columns * grid.per_cell
                drawn = [self._painter.row(values, y, block) for y in range(grid.cell_height)]
                cached = (row_bytes, drawn)
            rows[number] = cached
            lines += cached[1]
        self._rows = rows
        return lines[:room]

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

    def wheel_turned(self, by: int, event: events.MouseEvent) -> None:
        if event.shift or event.ctrl:
            self.scroll_rows(by)
            return
        is_inside = self._point(event)
        if by > 0:
            self.zoom_out()
        elif is_inside:
            self.post_message(self.ZoomRequested(slots=False))

    # ------------------------------------------------------------ zoom and colours

    def zoom_in(self) -> bool:
        """Zooms in one level, keeping the cursor's block; False if the slots are next."""
        grid = self.pool
        if grid is None or self.view is None or self.view.model is None:
            return True
        nearer = next_zoom(self.zoom, grid, self.view.model.block_size)
        if nearer is None:
            return False
        self._go(nearer)
        return True

    def zoom_out(self) -> bool:
        """Zooms out one level, keeping the cursor's block; False if the pool is shown."""
        if self.pool is None or self.zoom is Zoom.POOL:
            return False
        self._go(previous_zoom(self.zoom, self.pool))
        return True

    def _go(self, zoom: Zoom) -> None:
        if zoom is not self.zoom:
            self.keep_row()
            self.zoom = zoom
            self.redraw()

    def set_mode(self, mode: Mode) -> None:
        self.mode = mode
        self.redraw()


def _moves(activity: Activity, now: float, part: slice, per_cell: int) -> dict[str, Any]:
    """Fields `move` and `phase` of the visible cells [C]."""
    import numpy as np

    from vtoken_console.style import cells
    from vtoken_console.widgets.heatmap.cell_paint import PHASES

    left, came = activity.moves(now)
    left, came = (cells.peak_cells(values[part], per_cell) for values in (left, came))
    fresh = np.maximum(left, came)
    move = (left > 0) + 2 * (came > 0)
    phase = np.minimum((1 - fresh) * PHASES, PHASES - 1).astype(np.uint8)
    return {"move": move, "phase": np.where(move > 0, phase, 0)}
