"""A table: columns that fit, a head, rows with a cursor, and sums.

It is not Textual's DataTable, which keeps every cell of every row: for 256 requests that change in
every frame it takes 80 times the CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, merge
from vtoken_console.widgets.scroller import R, Scroller

if TYPE_CHECKING:
    from rich.style import Style


FILLS = 99  # the rank of a column that gets what the others leave
NAMING = 2  # columns that a row without figures has, too


@dataclass(frozen=True, slots=True, eq=False)
class Column(Generic[R]):
    """A fact of a row, at least `width` columns of the terminal.

    `rank`: 0 is dropped last from a narrow table. `text`: None for a bar. `most`: a bar, or a text
    that needs it, grows up to this width, before columns of a higher rank than `grows` are added.
    `legend`: in place of the head, where it fits. `total` is summed over the rows. `warns`: whether
    a row's text has the colour of a warning, followed by `mark`. `pressure`: shown only where
    requests give tokens under pressure.
    """

    head: str
    width: int
    rank: int
    text: Callable[[R], str] | None
    total: Callable[[R], float] | None = None
    left: bool = False
    pressure: bool = False
    most: int = 0
    grows: int = FILLS
    legend: str = ""
    warns: Callable[[R], bool] | None = None
    mark: str = ""

    def head_text(self, width: int) -> str:
        text = self.legend if self.legend and len(self.legend) <= width else self.head
        text = units.fit(text, width) if self.left else text.rjust(width)
        return text + " " * len(self.mark)


class Table(Scroller[R]):
    """A subclass calls `fit` before it draws."""

    HEAD = 1
    FOOT = 1
    COLUMNS: ClassVar[Sequence[Column[Any]]]

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.gap = " "  # before each column but the first
        self.widths: dict[Column[R], int] = {}  # of the columns that are shown, in order

    def double_clicked(self) -> None:
        self.app.simulate_key("enter")

    def mark_of(self, row: R) -> str:
        """The character before a row that is not under the cursor."""
        return " "

    def ink_of(self, row: R) -> Style:
        """The style of a row that is not under the cursor."""
        return palette.TEXT_STYLE

    def remark_on(self, row: R) -> Span | None:
        """What stands in place of the figures of a row that has none."""
        return None

    def cell(
        self, view: View, row: R, column: Column[R], width: int, ink: Style, *, selected: bool
    ) -> list[Span]:
        """A cell of `width` columns and its mark; `ink` is the row's style."""
        text = "" if column.text is None else column.text(row)
        text = units.fit(text, width) if column.left else text.rjust(width)
        if column.warns is None or not column.warns(row):
            return [(text + " " * len(column.mark), ink)]
        return [(text + column.mark, ink if selected else palette.WARN_STYLE)]

    def fit(self, rows: Sequence[R], width: int, *, pressure: bool) -> None:
        """Chooses the columns and their widths, the most important first."""
        columns = [c for c in self.COLUMNS if pressure or not c.pressure]
        steps = [(c.rank, False, n) for n, c in enumerate(columns)]
        steps += [(c.grows, True, n) for n, c in enumerate(columns) if c.most]
        widths = [0] * len(columns)
        room = width - 1 + len(self.gap)  # the first has a mark before it, and no gap
        is_full = False
        for rank, is_growth, n in sorted(steps):
            column = columns[n]
            if is_growth and widths[n]:
                more = max(0, min(_wish(column, rows) - column.width, room))
                widths[n] += more
                room -= more
            elif not is_growth and (not is_full or rank == FILLS):
                needed = len(self.gap) + column.width + len(column.mark)
                if needed <= room:
                    widths[n] = column.width
                    room -= needed
                else:
                    is_full = True
        self.widths = {c: width for c, width in zip(columns, widths, strict=True) if width}

    def build_head(self, view: View, width: int) -> list[Line]:
        heads = self.gap.join(column.head_text(wide) for column, wide in self.widths.items())
        return [((" " + heads, palette.MUTED_STYLE),)]

    def build_row(self, view: View, row: R, width: int, *, selected: bool) -> Line:
        ink = self.ink_of(row)
        if selected:
            ink = palette.CURSOR_STYLE if self.has_focus else palette.SELECTED_STYLE
        spans: list[Span] = [("›" if selected else self.mark_of(row), ink)]
        remark = self.remark_on(row)
        for number, (column, wide) in enumerate(self.widths.items()):
            spans += [(self.gap if number else "", ink)]
            if remark is not None and number == NAMING:
                text, style = remark
                return merge([*spans, (text, ink if selected else style)])
            spans += self.cell(view, row, column, wide, ink, selected=selected)
        return merge(spans)

    def build_foot(self, view: View, width: int) -> list[Line]:
        cells = []
        for column, wide in self.widths.items():
            total, text = column.total, ""
            if total is not None:
                text = units.brief_count(sum(total(row) for row in self.rows), wide)
            cells.append(text.rjust(wide) + " " * len(column.mark))
        first = next(iter(self.widths.values()), 0)
        cells[:1] = [units.fit("sum", first)]
        return [((" " + self.gap.join(cells), palette.BOLD_STYLE),)]


def _wish(column: Column[R], rows: Iterable[R]) -> int:
    """The width up to which a column grows."""
    text = column.text
    if text is None:
        return column.most
    return min(column.most, max((len(text(row)) for row in rows), default=0))
