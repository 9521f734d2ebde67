"""The panel of metrics, in columns: see `sections`."""

from __future__ import annotations

from rich.style import Style

from vtoken_console.frame.view import View
from vtoken_console.style import palette
from vtoken_console.widgets.figures.sections import (
    COLUMN,
    canary_section,
    cost_section,
    gates_section,
    latency_section,
    pressure_section,
    price_section,
    relocation_section,
    shadow_section,
)
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, merge, width_of

NUM_SECTIONS = 5


class Figures(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        status = view.model.status if view.model else None
        if status is None:
            return []
        self.set_titles("numbers")
        num = max(1, min(NUM_SECTIONS, width // (COLUMN + 1)))
        room = (width - 1) // num
        sections = [
            pressure_section(status),
            latency_section(status),
            gates_section(status, room - 1),
            relocation_section(view, status),
            canary_section(status),
            price_section(status),
            shadow_section(status),
            cost_section(view),
        ]
        columns = flow([s for s in sections if s], num, height)
        blank = palette.TEXT_STYLE
        return [
            merge(
                [(" ", blank)]
                + [span for column in columns for span in _padded(column, y, room, blank)]
            )
            for y in range(height)
        ]


def flow(sections: list[list[Line]], num: int, height: int) -> list[list[Line]]:
    """Puts each section into the shortest of `num` columns, separated by an empty line.

    A section of which only the title would be seen is left out.
    """
    columns: list[list[Line]] = [[] for _ in range(num)]
    for section in sections:
        column = min(columns, key=len)
        if column and len(column) + 2 < height:
            column += [EMPTY, *section]
        elif not column:
            column += section
    return [column[:height] for column in columns]


def _padded(column: list[Line], y: int, room: int, blank: Style) -> list[Span]:
    line = column[y] if y < len(column) else EMPTY
    return [*line, (" " * max(0, room - width_of(line)), blank)]
