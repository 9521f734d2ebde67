"""The tokens of one request in logical order: colour for live, dead and parked, a stripe for the
score.
"""

from __future__ import annotations

import numpy as np
from textual import events

from vtoken_console.feed import tokens
from vtoken_console.feed.tokens import NOWHERE, TokenTable
from vtoken_console.frame.view import View
from vtoken_console.style import cells, palette
from vtoken_console.style.grid import Grid, fit_pool
from vtoken_console.style.ramp import LEVELS, ink_on, mix
from vtoken_console.style.themes import nearest_number
from vtoken_console.widgets.cursor import CursorWidget
from vtoken_console.widgets.details.token_moved import TokenMoved
from vtoken_console.widgets.lines import EMPTY, Line, Span, cut, merge, width_of

PARKED = ("○", "o")  # [ASCII only]: without colours
SCORE_INKS = ("#30363d", "#6e7681", "#a8b0b8", "#d8dde2", "#ffffff")


class TokenStrip(CursorWidget):
    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.table: TokenTable | None = None
        self.cursor = 0
        self.num_sinks = 0
        self.num_prompt = 0
        self._grid: Grid | None = None

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        table = self.table
        if table is None or not len(table) or height < 3:
            text = " loading …" if table is None else " it holds no tokens now"
            return [EMPTY, ((text, palette.MUTED_STYLE),)]
        narrowest = 1 if view.ramp.colors else 2
        grid = fit_pool(len(table), width, height - 2, min_cell_width=narrowest)
        # Cells of one line keep the reading order from left to right.
        wide = min(grid.cell_width, 3)
        if grid.per_cell == 1:
            grid = Grid(len(table), 1, width // wide, wide, 1)
        self._grid = grid
        levels = cells.levels(tokens.live_share(table, grid.per_cell)).tolist()
        fills = [
            _fill(view, level, parked=parked)
            for level, parked in zip(
                levels, tokens.mostly_parked(table, grid.per_cell).tolist(), strict=True
            )
        ]
        rank = tokens.score_rank(table, grid.per_cell)
        protected = tokens.any_protected(table, grid.per_cell).tolist()
        inks = np.where(np.isnan(rank), -1, np.rint(np.nan_to_num(rank) * 4)).astype(int).tolist()
        at = grid.cell_of_block(min(self.cursor, len(table) - 1))
        first_output = grid.cell_of_block(self.num_prompt) if self.num_prompt else -1
        last_sink = grid.cell_of_block(self.num_sinks - 1) if self.num_sinks else -1
        lines: list[Line] = []
        for row in range(min(grid.rows, height - 2)):
            spans: list[Span] = []
            for cell in range(row * grid.columns, min((row + 1) * grid.columns, grid.num_cells)):
                mark = "|" if cell == first_output else "P" if protected[cell] else ""
                mark = "S" if cell <= last_sink else mark
                spans.append(
                    self._cell(
                        view, fills[cell], inks[cell], mark, grid.cell_width, cursor=cell == at
                    )
                )
            lines.append(merge(spans))
        lines += [EMPTY] * (height - 2 - len(lines))
        self.set_titles(f"{len(table):,} tokens in order · {grid.per_cell} a cell")
        legend = self._legend(view, width, has_protected=any(protected))
        return [*lines, self._foot(table, width), legend]

    def _cell(
        self, view: View, fill: str, ink: int, mark: str, width: int, *, cursor: bool
    ) -> Span:
        """`fill`: the cell's colour, or its glyph without colours."""
        if cursor:
            style = palette.CURSOR_CELL_STYLE if self.has_focus else palette.BLURRED_CELL_STYLE
            return (mark or "+").ljust(width), style
        if not view.ramp.colors:
            return (mark or fill).ljust(width, fill), palette.TEXT_STYLE
        if mark:
            return mark.ljust(width), palette.style(ink_on(fill), fill, bold=True)
        if ink >= 0:
            return "▂" * width, palette.style(SCORE_INKS[ink], fill)
        return " " * width, palette.style(None, fill)

    def _foot(self, table: TokenTable, width: int) -> Line:
        """The token under the cursor."""
        n = min(self.cursor, len(table) - 1)
        block, score = int(table.block[n]), float(table.score[n])
        words = [table.state(n)]
        words += ["protected"] * bool(table.protected[n])
        if block != NOWHERE:
            words.append(f"block {block:,} slot {int(table.offset[n])}")
        elif table.parked[n]:
            words.append("in host memory")
        else:
            words.append("slot reclaimed")
        words += [f"score {score:.3g}"] if score == score else []
        where = [(f" token {n:,}  ", palette.MUTED_STYLE), (", ".join(words), palette.TEXT_STYLE)]
        return merge(cut(where, width))

    def _legend(self, view: View, width: int, *, has_protected: bool) -> Line:
        """What the colours and letters mean, as much as fits whole."""
        muted, ramp, table = palette.MUTED_STYLE, view.ramp, self.table
        has_parked = table is not None and bool(table.parked.any())
        parts: list[list[Span]] = []
        if ramp.colors:
            named = [("dead", ramp.colors[0]), ("live", ramp.colors[-1])]
            if has_parked:
                named.append(("parked", _fill(view, 0, parked=True)))
            for name, color in named:
                parts.append([("  ", palette.style(None, color)), (f" {name}  ", muted)])
            scale = [("▂", palette.style(ink, ramp.colors[-1])) for ink in SCORE_INKS]
            if table is not None and table.has_scores:
                parts.append([*scale, (" score  ", muted)])
        else:
            parts.append([(f"{ramp.glyphs[0]} dead  {ramp.glyphs[-1]} live  ", muted)])
            parts += [[(f"{_fill(view, 0, parked=True)} parked  ", muted)]] * has_parked
        parts += [[("S sink  ", muted)]] * bool(self.num_sinks)
        parts += [[("P protected  ", muted)]] * has_protected
        parts.append([("| answer begins", muted)])
        spans: list[Span] = [(" ", muted)]
        for part in parts:
            if width_of(spans) + width_of(part) <= width:
                spans += part
        return merge(spans)

    def go(self, token: int) -> None:
        """Moves the cursor without a TokenMoved message."""
        self.cursor = max(0, token)
        self.redraw()

    def _post_moved(self, token: int) -> None:
        if self.table is not None and len(self.table):
            self.post_message(TokenMoved(max(0, min(token, len(self.table) - 1))))

    def action_move(self, dx: int, dy: int) -> None:
        grid = self._grid
        if grid is not None:
            self._post_moved(self.cursor + (dx + dy * grid.columns) * grid.per_cell)

    def action_jump(self, to: int) -> None:
        if self.table is not None:
            self._post_moved(0 if to == 0 else len(self.table) - 1)

    def on_click(self, event: events.Click) -> None:
        place, grid = event.get_content_offset(self), self._grid
        if place is not None and grid is not None:
            cell = grid.cell_at(place.x, place.y)
            if cell is not None:
                self._post_moved(grid.blocks_of(cell)[0])


def _fill(view: View, level: int, *, parked: bool) -> str:
    """The colour of a cell with this share of live tokens, or its glyph without colours; `parked`:
    the others are parked.
    """
    ramp = view.ramp
    if not ramp.colors:
        is_shown = parked and level < LEVELS // 2  # the other glyphs are those of live tokens
        return PARKED[view.ascii_only] if is_shown else ramp.glyphs[level]
    if not parked:
        return ramp.colors[level]
    color = mix(view.theme.color(palette.PARKED), ramp.colors[-1], level / (LEVELS - 1))
    return nearest_number(color) if view.theme.depth == "256" else color
