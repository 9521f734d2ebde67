"""The block table of one request, slot by slot: live, dead, or without a token of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events
from textual.message import Message

from vtoken_console.feed.tokens import TokenTable, slot_states
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.cursor import CursorWidget
from vtoken_console.widgets.lines import EMPTY, Line, Span, cut, merge

if TYPE_CHECKING:
    from vtoken import wire

LABEL = 8  # columns of a block's id
MAX_SLOTS = 64  # columns of a block's slots; larger blocks show several slots a column


class BlockTable(CursorWidget):
    class Moved(Message):
        """The cursor moved to another block."""

        def __init__(self, block: int) -> None:
            super().__init__()
            self.block = block

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.detail: wire.RequestDetail | None = None
        self.table: TokenTable | None = None
        self.block_size = 1
        self.token = 0
        self._columns = 1
        self._top = 0

    @property
    def block(self) -> int | None:
        """The block of the token under the cursor; None if it has no slot."""
        if self.table is None or self.token >= len(self.table):
            return None
        block = int(self.table.block[self.token])
        return block if block >= 0 else None

    @property
    def _cell_width(self) -> int:
        return LABEL + min(self.block_size, MAX_SLOTS) + 2

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        detail, tokens = self.detail, self.table
        if detail is None or tokens is None or not detail.block_table or height < 2:
            return []
        blocks = detail.block_table
        states = slot_states(tokens, blocks, self.block_size)
        columns = self._columns = max(1, width // self._cell_width)
        index = blocks.index(self.block) if self.block in blocks else -1
        rows, room = -(-len(blocks) // columns), height - 1
        at = max(index, 0) // columns
        self._top = max(min(self._top, at, max(0, rows - room)), at - room + 1, 0)
        lines: list[Line] = []
        for row in range(self._top, min(rows, self._top + room)):
            spans: list[Span] = []
            for n in range(row * columns, min((row + 1) * columns, len(blocks))):
                spans += self._block(view, blocks[n], states[n].tolist(), chosen=n == index)
            lines.append(merge(spans))
        lines += [EMPTY] * (room - len(lines))
        title = f"block table · {len(blocks):,} blocks of {self.block_size} slots"
        shown = min(rows, self._top + room) - self._top
        place = f"rows {self._top + 1:,}–{self._top + shown:,} of {rows:,}" if rows > room else ""
        self.set_titles(title, place)
        return [*lines, self._foot(index, width)]

    def _block(self, view: View, block: int, states: list[int], *, chosen: bool) -> list[Span]:
        style = palette.SELECTED_STYLE if not self.has_focus else palette.CURSOR_STYLE
        label = palette.FAINT_STYLE if not chosen else style
        spans: list[Span] = [(f"{block:>{LABEL - 1},} ", label)]
        per = -(-len(states) // MAX_SLOTS)
        cursor = -1
        if chosen and self.table is not None:
            cursor = int(self.table.offset[self.token]) // per
        for column in range(-(-len(states) // per)):
            part = states[column * per : (column + 1) * per]
            spans.append(_slot(view, min(part), max(part), cursor=column == cursor))
        return [*spans, ("  ", palette.TEXT_STYLE)]

    def _foot(self, index: int, width: int) -> Line:
        muted, text, detail = palette.MUTED_STYLE, palette.TEXT_STYLE, self.detail
        if detail is None or index < 0:
            return ((f" token {self.token:,}: its slot was reclaimed or recycled", muted),)
        live = detail.block_live[index] if index < len(detail.block_live) else 0
        spans: list[Span] = [
            (f" token {self.token:,} in ", muted),
            (f"block {detail.block_table[index]:,}", text),
            (f", index {index:,}: {live}/{self.block_size} live", text),
            ("   enter slots", palette.FAINT_STYLE),
        ]
        return merge(cut(spans, width))

    def _go(self, index: int) -> None:
        if self.detail is not None and 0 <= index < len(self.detail.block_table):
            self.post_message(self.Moved(self.detail.block_table[index]))

    def _index(self) -> int:
        blocks = self.detail.block_table if self.detail is not None else []
        return blocks.index(self.block) if self.block in blocks else 0

    def action_move(self, dx: int, dy: int) -> None:
        self._go(self._index() + dx + dy * self._columns)

    def action_jump(self, to: int) -> None:
        blocks = self.detail.block_table if self.detail is not None else []
        self._go(to % max(1, len(blocks)))

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is not None and place.x // self._cell_width < self._columns:
            self._go((place.y + self._top) * self._columns + place.x // self._cell_width)


def _slot(view: View, least: int, most: int, *, cursor: bool) -> Span:
    """One column of slots: 0 free, 1 dead, 2 live. A mixed column shows its worst used slot."""
    state = most if least == 0 else least
    ramp = view.ramp
    glyph = "·x#"[state] if view.ascii_only else "·░█"[state]
    if cursor:
        return glyph if view.ascii_only else " ", palette.CURSOR_CELL_STYLE
    if not ramp.colors:
        return glyph, palette.TEXT_STYLE
    if state == 0:
        return "·", palette.FAINT_STYLE
    return " ", palette.style(None, ramp.colors[0 if state == 1 else -1])
