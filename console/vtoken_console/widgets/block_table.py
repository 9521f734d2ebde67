"""The blocks of one request in table order, each with the live tokens it holds of this request."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from vtoken_console import palette
from vtoken_console.ramp import ink_on, level_of
from vtoken_console.view import View
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, cut, merge

if TYPE_CHECKING:
    from vtoken import wire


class BlockTable(LinesWidget, can_focus=True):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", show=False),
        Binding("right", "move(1)", show=False),
        Binding("up", "row(-1)", show=False),
        Binding("down", "row(1)", show=False),
    ]

    class Moved(Message):
        """The cursor stands on another block."""

        def __init__(self, block: int) -> None:
            super().__init__()
            self.block = block

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.detail: wire.RequestDetail | None = None
        self.block_size = 1
        self.block: int | None = None  # the block under the cursor; None: the token lies nowhere
        self._columns = 1
        self._top = 0
        self._cell_width = 4

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        detail = self.detail
        if detail is None or not detail.block_table or height < 2:
            return []
        digits = len(str(self.block_size))
        self._cell_width = digits + 2
        columns = self._columns = max(1, width // self._cell_width)
        table, live = detail.block_table, detail.block_live
        index = table.index(self.block) if self.block in table else -1
        rows, room = -(-len(table) // columns), height - 1
        at = max(index, 0) // columns
        self._top = max(min(self._top, at, max(0, rows - room)), at - room + 1, 0)
        lines: list[Line] = []
        for row in range(self._top, min(rows, self._top + room)):
            spans: list[Span] = []
            for n in range(row * columns, min((row + 1) * columns, len(table))):
                text = f"{live[n]:>{digits}} "
                level = level_of(live[n] / self.block_size)
                if n == index:
                    focused = "#ffffff" if self.has_focus else "#9aa4af"
                    look = palette.style("#000000", focused, bold=True)
                elif view.ramp.colors:
                    color = view.ramp.colors[level]
                    look = palette.style(ink_on(color), color)
                else:
                    look, text = palette.TEXT_STYLE, text[:-1] + view.ramp.glyphs[level]
                spans += [(text, look), (" ", palette.TEXT_STYLE)]
            lines.append(merge(spans))
        lines += [EMPTY] * (room - len(lines))
        self.border_title = f"block table · {len(table):,} blocks of {self.block_size} slots"
        if view.ascii_only:
            self.border_title = self.border_title.replace("·", "-")
        return [*lines, self._foot(index, width)]

    def _foot(self, index: int, width: int) -> Line:
        muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
        detail = self.detail
        if detail is None or index < 0:
            return ((" the token's slot was given back or recycled", muted),)
        spans: list[Span] = [
            (f" place {index:,} ", muted),
            (f"block {detail.block_table[index]:,}  ", text),
            (f"{detail.block_live[index]}/{self.block_size} live", text),
            ("   enter slots", palette.FAINT_STYLE),
        ]
        return merge(cut(spans, width))

    def _go(self, index: int) -> None:
        if self.detail is not None and 0 <= index < len(self.detail.block_table):
            self.post_message(self.Moved(self.detail.block_table[index]))

    def _index(self) -> int:
        table = self.detail.block_table if self.detail is not None else []
        return table.index(self.block) if self.block in table else 0

    def action_move(self, by: int) -> None:
        self._go(self._index() + by)

    def action_row(self, by: int) -> None:
        self._go(self._index() + by * self._columns)

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is not None:
            self._go((place.y + self._top) * self._columns + place.x // self._cell_width)

    def watch_has_focus(self, _focus: bool) -> None:
        self.redraw()
