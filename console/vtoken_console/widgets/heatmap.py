"""The heatmap of all blocks, at two zooms: the whole pool in the widget, or a cell for each block.

The mean and the worst of a cell are drawn, never a majority. numpy is imported with the first
data, so that the first frame does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from vtoken_console import palette
from vtoken_console.ramp import Ramp
from vtoken_console.view import View
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, cut, merge

if TYPE_CHECKING:
    from vtoken_console.cells import Cells, Grid
    from vtoken_console.model import Model
    from vtoken_console.widgets.cell_paint import Row

MOVES_SHOWN_S = 1.5
FOOT = 2  # legend, what is under the cursor


class Heatmap(LinesWidget, can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(0, -1)", show=False),
        Binding("down", "move(0, 1)", show=False),
        Binding("left", "move(-1, 0)", show=False),
        Binding("right", "move(1, 0)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "jump(0)", show=False),
        Binding("end", "jump(-1)", show=False),
    ]

    class Chosen(Message):
        """A block was double-clicked."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.cursor = -1  # block id; -1: not placed yet
        self.zoomed = False  # a cell for each block
        self.top = 0  # first row in sight
        self._grid: Grid | None = None
        self._cells: Cells | None = None
        self._moves: dict[int, str] = {}  # block -> glyph
        self._moves_seq = -1
        self._moves_since = 0.0
        self._cache: dict[tuple[Row, str, int, int, bool], Line] = {}

    # ------------------------------------------------------------ drawing

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        model = view.model
        if model is None or not model.num_blocks or height <= FOOT:
            return []
        from vtoken_console import cells
        from vtoken_console.widgets import cell_paint

        room = height - FOOT
        if self.zoomed:
            grid = cells.fit_blocks(model.num_blocks, width, model.block_size)
        else:
            narrowest = 1 if view.ramp.colors else 2
            grid = cells.fit_pool(model.num_blocks, width, room, min_cell_width=narrowest)
        found = cells.summarize(model.live, model.flags, model.block_size, grid.per_cell)
        self._grid, self._cells = grid, found
        if self.cursor < 0:
            self.cursor = int((model.flags != 0).argmax())
        self.cursor = min(self.cursor, model.num_blocks - 1)
        mean, worst = cells.levels(found.mean).tobytes(), cells.levels(found.worst).tobytes()
        flags = found.flags.tobytes()
        self._note_moves(model, view.monotonic)
        shown = view.monotonic - self._moves_since
        moving = self._moves if shown < MOVES_SHOWN_S else {}
        self._scroll(grid, room)
        self._title(model, grid, room)
        moves_by_row: dict[int, dict[int, str]] = {}
        for block, glyph in moving.items():
            at, column = divmod(grid.cell_of_block(block), grid.columns)
            moves_by_row.setdefault(at, {})[column] = glyph
        cursor_row, cursor_column = divmod(grid.cell_of_block(self.cursor), grid.columns)
        roomy = grid.cell_width >= len(str(model.block_size)) + 2
        single = grid.per_cell == 1 and roomy
        lines: list[Line] = []
        cache = self._cache
        self._cache = {}
        rows_in_sight = range(self.top, min(grid.rows, self.top + room // grid.cell_height))
        for number in rows_in_sight:
            first = number * grid.columns
            last = min(first + grid.columns, grid.num_cells)
            row = cell_paint.Row(
                mean[first:last],
                worst[first:last],
                flags[first:last],
                tuple(model.live[first:last].tolist()) if single else None,
                grid.cell_width,
                cursor_column if number == cursor_row else -1,
                tuple(sorted(moves_by_row.get(number, {}).items())),
                shown < MOVES_SHOWN_S / 2,
            )
            for part in range(grid.cell_height):
                key = (row, view.ramp.name, part, grid.cell_height, self.has_focus)
                line = cache.get(key)
                if line is None:
                    line = cell_paint.paint(
                        row, view.ramp, part, grid.cell_height, focused=self.has_focus
                    )
                self._cache[key] = line
                lines.append(line)
        lines += [EMPTY] * (room - len(lines))
        return [*lines, legend(view.ramp, width, zoomed=single), self._under_cursor(view, width)]

    def _note_moves(self, model: Model, monotonic: float) -> None:
        from vtoken_console.widgets.cell_paint import DESTINATION, SOURCE

        newest = model.newest_relocation
        if newest is None or newest.seq == self._moves_seq:
            return
        first_sight = self._moves_seq < 0
        self._moves_seq = newest.seq
        if first_sight:
            return  # from before this console looked
        self._moves_since = monotonic
        self._moves = {}
        for event in reversed(model.events):
            if event.kind == "relocation" and event.step == newest.step:
                sources = event.data.get("source_blocks", ())
                into = event.data.get("destination_blocks", ())
                self._moves.update(dict.fromkeys(sources, SOURCE))
                self._moves.update(dict.fromkeys(into, DESTINATION))
            elif event.step < newest.step:
                break
        self._moves = {b: g for b, g in self._moves.items() if 0 <= b < model.num_blocks}

    def _scroll(self, grid: Grid, room: int) -> None:
        rows = max(1, room // grid.cell_height)
        row = grid.cell_of_block(self.cursor) // grid.columns
        self.top = max(0, min(self.top, grid.rows - rows))
        if row < self.top:
            self.top = row
        elif row >= self.top + rows:
            self.top = row - rows + 1

    def _title(self, model: Model, grid: Grid, room: int) -> None:
        total = f"{model.num_blocks:,} blocks"
        if self.zoomed:
            title = f"blocks · {total} of {model.block_size} slots"
            rows = max(1, room // grid.cell_height)
            first, last = self.top * grid.columns, (self.top + rows) * grid.columns
            place = f"{first:,}–{min(last, grid.num_blocks) - 1:,} of {grid.num_blocks:,}"
        else:
            per = "one block a cell" if grid.per_cell == 1 else f"{grid.per_cell} blocks a cell"
            title, place = f"pool · {total} · {per}", ""
        self.entitle(title, place)

    def _under_cursor(self, view: View, width: int) -> Line:
        model, grid, found = view.model, self._grid, self._cells
        if model is None or grid is None or found is None:
            return EMPTY
        size = model.block_size
        cell = grid.cell_of_block(self.cursor)
        blocks = grid.blocks_of(cell)
        muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
        if len(blocks) == 1:
            flags = int(model.flags[self.cursor])
            spans: list[Span] = [(f" block {self.cursor:,}  ", muted)]
            if flags == 0:
                spans.append(("free", text))
            else:
                live = int(model.live[self.cursor])
                spans.append((f"{live:>{len(str(size))}}/{size} live", text))
                spans += [(f"  {word}", text) for word in flag_words(flags)]
            spans.append(("   z slots" if self.zoomed else "   z blocks", palette.FAINT_STYLE))
            return merge(cut(spans, width))
        used = int(found.num_used[cell])
        spans = [(f" blocks {blocks[0]:,}–{blocks[-1]:,}  ", muted)]
        spans.append((f"{used} of {len(blocks)} used", text))
        if used:
            part = slice(blocks[0], blocks[-1] + 1)
            live_here, flags_here = model.live[part], model.flags[part]
            at = min((int(v), i) for i, v in enumerate(live_here) if flags_here[i])[1]
            spans.append((f"  mean {found.mean[cell]:4.0%}", text))
            spans.append((f"  worst {found.worst[cell]:4.0%} (block {blocks[0] + at:,})", text))
            spans += [(f"  {word}", text) for word in flag_words(int(found.flags[cell]))]
        return merge(cut(spans, width))

    # ------------------------------------------------------------ moving

    def action_move(self, dx: int, dy: int) -> None:
        grid = self._grid
        if grid is None:
            return
        cell = grid.cell_of_block(self.cursor) + dx + dy * grid.columns
        if 0 <= cell < grid.num_cells:
            self.cursor = grid.blocks_of(cell)[0]
            self.redraw()

    def action_page(self, by: int) -> None:
        grid = self._grid
        if grid is not None:
            rows = max(1, (self.content_size.height - FOOT) // grid.cell_height)
            cell = grid.cell_of_block(self.cursor) + by * rows * grid.columns
            self.cursor = grid.blocks_of(max(0, min(cell, grid.num_cells - 1)))[0]
            self.redraw()

    def action_jump(self, to: int) -> None:
        if self._grid is not None:
            self.cursor = 0 if to == 0 else self._grid.num_blocks - 1
            self.redraw()

    def set_zoom(self, zoomed: bool) -> None:
        """Shows a cell for each block, or the pool as a whole; the cursor keeps its block."""
        self.zoomed = zoomed
        self.top = 0
        self.redraw()

    def _block_at(self, event: events.MouseEvent) -> int | None:
        place = event.get_content_offset(self)
        grid = self._grid
        if place is None or grid is None or place.y >= self.content_size.height - FOOT:
            return None
        cell = grid.cell_at(place.x, place.y + self.top * grid.cell_height)
        return None if cell is None else grid.blocks_of(cell)[0]

    def on_mouse_move(self, event: events.MouseMove) -> None:
        block = self._block_at(event)
        if block is not None and block != self.cursor:
            self.cursor = block
            self.redraw()

    def on_click(self, event: events.Click) -> None:
        if event.chain == 2 and self._block_at(event) is not None:
            self.post_message(self.Chosen())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(0, 1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(0, -1)

    def watch_has_focus(self, _focus: bool) -> None:
        self.redraw()


def flag_words(flags: int) -> list[str]:
    """The flags in words, the pinning ones first."""
    from vtoken import wire

    names = (
        (wire.FLAG_SHARED, "shared"),
        (wire.FLAG_HASHED, "hashed"),
        (wire.FLAG_IN_FLIGHT, "in flight"),
        (wire.FLAG_TAIL, "tail"),
    )
    return [word for bit, word in names if flags & bit]


def legend(ramp: Ramp, width: int, *, zoomed: bool) -> Line:
    """What the looks mean, in one line."""
    muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
    spans: list[Span] = [(" dead ", muted)]
    if ramp.colors:
        spans += [(" ", palette.style(None, color)) for color in ramp.colors[::2]]
    else:
        spans.append((ramp.glyphs[::2], text))
    spans.append((" live  ", muted))
    if ramp.colors:
        spans += [("·", palette.style(palette.FAINT, ramp.free_color)), (" free  ", muted)]
    else:
        spans.append(("blank free  ", muted))
    if zoomed:
        spans.append(("s shared h hashed * in flight t tail", muted))
    elif ramp.colors:
        sample = palette.style(ramp.colors[2], ramp.colors[-3])
        spans += [("▂", sample), (" mean over worst  ", muted)]
    else:
        spans.append(("left mean, right worst  ", muted))
    if not zoomed or width > 90:
        moves = "o from @ to" if ramp.name == "ascii" else "○ moved from ● to"
        spans.append((moves if not zoomed else "  " + moves, muted))
    return merge(cut(spans, width))
