"""How a row of heatmap cells looks: colour for the mean, a stripe for the worst, marks for flags.

Knows no widget and no server. A cell of one block shows its live count as text as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

from vtoken.wire import FLAG_HASHED, FLAG_IN_FLIGHT, FLAG_SHARED, FLAG_TAIL
from vtoken_console import palette
from vtoken_console.ramp import LEVELS, Ramp, ink_on
from vtoken_console.widgets.lines import Line, Span, merge

FREE_LEVEL = LEVELS
STRIPE = "▂"  # the lower quarter of a cell: its worst block
MARKS = ((FLAG_IN_FLIGHT, "*"), (FLAG_SHARED, "s"), (FLAG_HASHED, "h"), (FLAG_TAIL, "t"))
SOURCE, DESTINATION = "○", "●"
ASCII_MOVES = {SOURCE: "o", DESTINATION: "@"}


def mark_of(flags: int) -> str:
    """One letter for the flag that matters most; blank when there is none."""
    return next((letter for bit, letter in MARKS if flags & bit), " ")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of cells. `live`: set when a cell is one block and wide enough for its count.

    `moves`: column -> glyph.
    """

    mean: bytes  # ramp level, FREE_LEVEL when free
    worst: bytes
    flags: bytes
    live: tuple[int, ...] | None
    cell_width: int
    cursor: int  # column, -1 when elsewhere
    moves: tuple[tuple[int, str], ...]
    fresh: bool  # moves just happened


def background(ramp: Ramp, level: int) -> str:
    return ramp.free_color if level == FREE_LEVEL else ramp.colors[level]


@lru_cache(maxsize=8192)
def _small(ramp: Ramp, mean: int, worst: int, mark: str, width: int) -> Span:
    if not ramp.colors:
        glyphs = ramp.glyphs + " "
        return glyphs[mean] + glyphs[worst] * (width - 1), palette.TEXT_STYLE
    back = background(ramp, mean)
    if mean == FREE_LEVEL:
        return "·" * width, palette.style(palette.BORDER, back)
    if width > 1 and mark != " ":
        return " " * (width - 1) + mark, palette.style(ink_on(back), back)
    if worst != mean:
        return STRIPE * width, palette.style(background(ramp, worst), back)
    return " " * width, palette.style(None, back)


def paint(row: Row, ramp: Ramp, line: int, height: int, *, focused: bool) -> Line:
    """Line `line` of the `height` lines of a row of cells."""
    moves = dict(row.moves)
    if row.live is not None:
        return _paint_text(row, ramp, line, height, moves, focused=focused)
    spans: list[Span] = []
    for x, (mean, worst) in enumerate(zip(row.mean, row.worst, strict=True)):
        text, look = _small(ramp, mean, worst, mark_of(row.flags[x]), row.cell_width)
        if x in moves:
            text = _move_text(moves[x], ramp, row.cell_width)
            look = _move_style(ramp, mean, fresh=row.fresh)
        if x == row.cursor:
            text = (text[0] if not ramp.colors else "+") + text[1:]
            look = _cursor_style(focused=focused)
        spans.append((text, look))
    return merge(spans)


def _paint_text(
    row: Row, ramp: Ramp, line: int, height: int, moves: Mapping[int, str], *, focused: bool
) -> Line:
    assert row.live is not None
    room = row.cell_width - 1
    gap = (" ", palette.style(None, None))
    spans: list[Span] = []
    for x, mean in enumerate(row.mean):
        free = mean == FREE_LEVEL
        mark = _move_text(moves[x], ramp, 1) if x in moves else mark_of(row.flags[x])
        text = "" if free else str(row.live[x])
        if ramp.colors:
            back = background(ramp, mean)
            look = palette.style(palette.FAINT if free else ink_on(back), back, bold=x in moves)
            tail = palette.style(back)
        else:
            back, look, tail = "", palette.TEXT_STYLE, palette.TEXT_STYLE
        if x == row.cursor:
            look = _cursor_style(focused=focused)
        fill = " " if ramp.colors else (ramp.glyphs + " ")[mean]
        if line == 0:
            body = "·".rjust(room - 1) if free and ramp.colors else text.rjust(room - 1, fill)
            spans.append((body + mark, look))
        elif line == height - 1 and ramp.colors:
            spans.append(("▆" * room, tail if x != row.cursor else palette.style("#ffffff")))
        else:
            spans.append((fill * room, look))
        spans.append(gap)
    return merge(spans)


def _move_text(glyph: str, ramp: Ramp, width: int) -> str:
    plain = ramp.name == "ascii"
    return (ASCII_MOVES[glyph] if plain else glyph) + " " * (width - 1)


def _move_style(ramp: Ramp, level: int, *, fresh: bool) -> Style:
    if not ramp.colors:
        return palette.BOLD_STYLE
    back = background(ramp, level)
    ink = ink_on(back) if fresh else ("#3d3d3d" if ink_on(back) == "#000000" else "#b8c0c8")
    return palette.style(ink, back, bold=fresh)


def _cursor_style(*, focused: bool) -> Style:
    return palette.style("#000000", "#ffffff" if focused else "#9aa4af", bold=True)
