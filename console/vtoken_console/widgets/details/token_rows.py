"""The token table as rows: token, block, slot, state, score."""

from __future__ import annotations

from vtoken_console.feed.tokens import TokenTable
from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.lines import Line, merge
from vtoken_console.widgets.scroller import Scroller

INKS = {  # by state
    "live": palette.TEXT_STYLE,
    "dead": palette.style(palette.DEAD),
    "parked": palette.style(palette.PARKED),
}


class TokenRows(Scroller[int]):
    HEAD = 1

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.table: TokenTable | None = None

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        self.rows = range(0 if self.table is None else len(self.table))
        return super().build_lines(view, width, height)

    def cursor_moved(self) -> None:
        self.post_message(TokenMoved(self.cursor))

    def go(self, token: int) -> None:
        """Moves the cursor without a TokenMoved message."""
        self.cursor = token
        self.redraw()

    def build_head(self, view: View, width: int) -> list[Line]:
        score = f" {'score':>7}" if self.table is not None and self.table.has_scores else ""
        text = f" {'token':>7} {'block':>6} {'slot':>4}  state{score}"
        return [((text, palette.MUTED_STYLE),)]

    def build_row(self, view: View, row: int, width: int, *, selected: bool) -> Line:
        table = self.table
        assert table is not None
        block, offset, score = int(table.block[row]), int(table.offset[row]), table.score[row]
        state = table.state(row)
        where = f"{block:>6,} {offset:>4}" if block >= 0 else f"{'–':>6} {'–':>4}"
        value = f"{score:>7.3g}" if score == score else " " * 7  # NaN: no score
        line = f" {row:>7,} {where}  {state:<6}{value}"
        if selected:
            style = palette.CURSOR_STYLE if self.has_focus else palette.SELECTED_STYLE
            return ((line.ljust(width), style),)
        return merge([(line, INKS[state])])
