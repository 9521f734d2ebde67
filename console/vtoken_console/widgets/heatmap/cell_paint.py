"""Heatmap cells as integers, and their painting: colour for the mean, a stripe for the worst block,
a glyph for flags.

A cell is packed into one integer, its code, so that rows can be compared and cached. Cells with
equal codes look the same under one `CellPainter`, which paints each code once. C cells.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.style import Style

from vtoken.wire import FLAG_IN_FLIGHT, FLAG_SHARED, FLAG_TAIL
from vtoken_console.style import palette
from vtoken_console.style.ramp import FREE_LEVEL, LEVELS, OTHER_LEVEL, Ramp, ink_on, mix
from vtoken_console.style.themes import Theme, nearest_number
from vtoken_console.widgets.heatmap.colouring import STATE_KINDS, Mode
from vtoken_console.widgets.lines import Line, Span, merge

# (first bit, bits) of every field of a code
_FIELDS = {
    "mean": (0, 5),  # ramp level, FREE_LEVEL or OTHER_LEVEL
    "worst": (5, 5),
    "mark": (10, 3),  # index in MARKS
    "move": (13, 2),  # 1 source, 2 destination, 3 both
    "phase": (15, 2),  # 0 just now, then fading
    "cursor": (17, 1),
    "kind": (18, 16),  # 0 mixed
    "kinds": (34, 4),  # number of kinds, at most MANY; 0: the cell shows an amount
    "live": (38, 16),  # live slots of a single block
    "dim": (54, 1),  # none of its blocks matches the filter
}
MANY = 10
MARKS = " *sf"  # moving, shared, being filled; most others are in the prefix cache
_FLAG_MARKS = ((FLAG_TAIL, 3), (FLAG_SHARED, 2), (FLAG_IN_FLIGHT, 1))

Codes = npt.NDArray[np.uint64]


STRIPE = "▂"  # the lower quarter of a cell, for its worst block
UPPER_HALF = "▀"
FREE, OTHER = "·", "~"
DIMMED = 0.75  # the share of the background in the colour of a dim cell
SOURCE, DESTINATION, BOTH = 1, 2, 3
# (glyph, ASCII glyph) of a move by phase: a source fades out, a destination brightens.
MOVES = {
    SOURCE: (("○", "o"), ("○", "o"), ("◌", ".")),
    DESTINATION: (("•", "+"), ("●", "@"), ("●", "@")),
    BOTH: (("◐", "%"), ("◐", "%"), ("◐", "%")),
}
PHASES = 3
LETTERS = string.ascii_lowercase


def letter_of(number: int) -> str:
    """The letter of the owner with this number."""
    return LETTERS[(number - 1) % len(LETTERS)] if number > 0 else "?"


def _mark_table() -> npt.NDArray[np.uint8]:
    flags = np.arange(256)
    table = np.zeros(256, np.uint8)
    for bit, mark in _FLAG_MARKS:
        table[flags & bit != 0] = mark
    return table


_MARK_OF = _mark_table()


def mark_of(flags: Any) -> Any:
    """The index in MARKS of the most important flag in each of `flags` [C]."""
    return _MARK_OF[flags]


def pack(num_cells: int, **fields: Any) -> Codes:
    """Codes [C] of fields [C] or scalars; missing fields are 0."""
    out = np.zeros(num_cells, np.uint64)
    for name, values in fields.items():
        first, bits = _FIELDS[name]
        limit = (1 << bits) - 1
        part = np.minimum(np.asarray(values).astype(np.uint64), np.uint64(limit))
        out |= part << np.uint64(first)
    return out


@dataclass(frozen=True, slots=True)
class Cell:
    """The fields of one code."""

    mean: int = 0
    worst: int = 0
    mark: int = 0
    move: int = 0
    phase: int = 0
    cursor: int = 0
    kind: int = 0
    kinds: int = 0
    live: int = 0
    dim: int = 0


def unpack(code: int) -> Cell:
    """The fields of one code."""
    return Cell(**{n: code >> first & (1 << bits) - 1 for n, (first, bits) in _FIELDS.items()})


@dataclass(slots=True, eq=False)
class CellPainter:
    """Paints and caches the cells of one mode, theme and grid.

    `text`: each cell is a block and shows its live count; `ids`: also its id, on a separate line.
    """

    theme: Theme
    ramp: Ramp
    mode: Mode
    width: int = 1
    height: int = 1
    text: bool = False
    ids: bool = False
    focused: bool = False
    ascii_only: bool = False
    _spans: dict[tuple[int, int], tuple[Span, ...]] = field(default_factory=dict)

    def row(self, codes: Iterable[int], line: int, first_block: int = 0) -> Line:
        """Line `line` of a row of cells; the first cell is of `first_block`."""
        cache = self._spans
        spans: list[Span] = []
        for block, code in enumerate(codes, first_block):
            painted = cache.get((code, line))
            if painted is None:
                painted = cache[code, line] = self._paint(unpack(code), line)
            if self.ids and line == 0:
                (text, style), gap = painted
                number = str(block)
                painted = (number + text[len(number) :], style), gap
            spans.extend(painted)
        return merge(spans)

    # ------------------------------------------------------------ one cell

    def _paint(self, cell: Cell, line: int) -> tuple[Span, ...]:
        if self.text:
            return self._text_cell(cell, line)
        text, style = self._body(cell)
        if cell.dim:
            style = self._dimmed(style)
        if cell.move and line == 0:
            text, style = self._moved(cell, text, style)
        if cell.cursor:
            first = text[0] if text[0] not in " " + STRIPE else "+"
            return ((first + text[1:].replace(STRIPE, " "), self._cursor()),)
        return ((text, style),)

    def _body(self, cell: Cell) -> Span:
        width, coloured = self.width, bool(self.ramp.colors)
        if cell.mean == FREE_LEVEL:
            if not coloured:
                return " " * width, palette.TEXT_STYLE
            return FREE * width, palette.style(palette.BORDER, self.ramp.free_color)
        if cell.mean == OTHER_LEVEL:
            return OTHER * width, self._other()
        if cell.kinds:
            letter, style = self._kind(cell)
            return letter.rjust(width) if width > 1 else letter, style
        if not coloured:
            glyphs = self.ramp.glyphs
            if width > 1 and cell.mark:
                if self._is_solid(cell):
                    return MARKS[cell.mark].rjust(width), palette.INVERSE_STYLE
                return glyphs[cell.mean] * (width - 1) + MARKS[cell.mark], palette.TEXT_STYLE
            return glyphs[cell.mean] + glyphs[cell.worst] * (width - 1), palette.TEXT_STYLE
        back = self.ramp.colors[cell.mean]
        if width > 1 and cell.mark:
            return MARKS[cell.mark].rjust(width), palette.style(ink_on(back), back)
        if cell.worst != cell.mean:
            return STRIPE * width, palette.style(self.ramp.colors[cell.worst], back)
        return " " * width, palette.style(None, back)

    def _is_solid(self, cell: Cell) -> bool:
        """Whether glyphs fill the cell, so that a mark on the background would look like a hole."""
        filled = LEVELS // 2 < cell.mean < FREE_LEVEL and not cell.kinds
        return filled and not self.ramp.colors and not self.ascii_only

    def _kind(self, cell: Cell) -> Span:
        """The letter of the kind, or the number of kinds."""
        if cell.kinds > 1:
            text = "+" if cell.kinds >= MANY else str(cell.kinds)
            return text, palette.MUTED_STYLE
        owner = self.mode is Mode.OWNER
        text = letter_of(cell.kind) if owner else STATE_KINDS[cell.kind - 1].letter
        if not self.ramp.colors:
            return text, palette.TEXT_STYLE
        back = self._hue(cell)
        return text, palette.style(ink_on(back), back)

    def _hue(self, cell: Cell) -> str:
        """The colour of the only kind in a cell."""
        owner = self.mode is Mode.OWNER
        return self.theme.hue(cell.kind if owner else STATE_KINDS[cell.kind - 1].hue)

    def _dimmed(self, style: Style) -> Style:
        """The style of a cell that a filter does not find."""
        if not self.ramp.colors:
            return palette.style(palette.BORDER)
        ground = self.theme.color(palette.BACKGROUND)
        back = mix(self._back(style), ground, DIMMED)
        if self.theme.depth == "256":
            back = nearest_number(back)
        return palette.style(palette.FAINT, back)

    def _moved(self, cell: Cell, text: str, style: Style) -> Span:
        glyph = MOVES[cell.move][cell.phase][self.ascii_only]
        if self._is_solid(cell):
            return glyph.ljust(len(text)), palette.INVERSE_STYLE
        if not self.ramp.colors:
            return glyph + text[1:], palette.BOLD_STYLE
        back = self._back(style)
        ink = ink_on(back)
        if cell.move == SOURCE and cell.phase:
            ink = mix(ink, back, 0.35 * cell.phase)
        elif cell.move == DESTINATION and cell.phase == 0:
            ink = mix(ink, back, 0.35)
        if self.theme.depth == "256":
            ink = nearest_number(ink)
        return glyph + " " * (len(text) - 1), palette.style(ink, back, bold=True)

    def _back(self, style: Style) -> str:
        color = style.bgcolor
        if color is None or color.triplet is None:
            return self.theme.color(palette.BACKGROUND)
        return self.theme.color(color.triplet.hex)

    def _other(self) -> Style:
        if not self.ramp.colors:
            return palette.MUTED_STYLE
        return palette.style(palette.MUTED, self.ramp.other_color)

    def _cursor(self) -> Style:
        return palette.CURSOR_CELL_STYLE if self.focused else palette.BLURRED_CELL_STYLE

    # ------------------------------------------------------------ cells with a live count

    def _text_cell(self, cell: Cell, line: int) -> tuple[Span, ...]:
        """The mark in the upper right corner; the live count beside it, or centred below."""
        room = self.width - 1
        gap = (" ", palette.NO_STYLE)
        free = cell.mean == FREE_LEVEL
        coloured = bool(self.ramp.colors)
        mark, fill = MARKS[cell.mark], " "
        if cell.move:
            mark = MOVES[cell.move][cell.phase][self.ascii_only]
        elif cell.kinds:
            mark = self._kind(cell)[0]
        if free:
            body = FREE if coloured else ""
            style = palette.style(palette.FAINT, self.ramp.free_color if coloured else None)
        elif cell.mean == OTHER_LEVEL:
            body, style = OTHER, self._other()
        elif not coloured:
            fill = " " if cell.kinds else self.ramp.glyphs[cell.mean]
            body, style = str(cell.live), palette.TEXT_STYLE
        else:
            back = self._hue(cell) if cell.kinds else self.ramp.colors[cell.mean]
            body = str(cell.live)
            style = palette.style(ink_on(back), back, bold=bool(cell.move))
        if cell.dim:
            style = self._dimmed(style)
        if cell.cursor:
            style = self._cursor()
        middle = self.height // 2 if self.ids else 0
        if line == 0:
            text = (" " * (room - 1) if self.ids else body.rjust(room - 1, fill)) + mark
        else:
            text = (body if line == middle else "").center(room, fill)
        if line > middle and line == self.height - 1 and style.bgcolor and not self.ascii_only:
            edge = style.bgcolor.get_truecolor().hex  # half a line of gap between rows of cells
            return (UPPER_HALF * room, palette.style(edge)), gap
        return (text, style), gap
