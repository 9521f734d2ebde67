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


NAMING = 2  # columns that a row without figures has, too


@dataclass(frozen=True, slots=True, eq=False)
class Column(Generic[R]):
    """A fact of a row, at least `width` columns of the terminal.

    `rank`: 0 is dropped last from a narrow table. `text`: None for a bar. `most`: a bar, or a text
    that needs it, grows up to this width, before columns of a higher rank than `grows` are added.
    `total` is summed over the rows. `warns`: whether a row's text has the colour of a warning,
    followed by `mark`. `pressure`: shown only where requests give tokens under pressure.
    """

    head: str
    width: int
    rank: int
    text: Callable[[R], str] | None
    total: Callable[[R], float] | None = None
    left: bool = False
    pressure: bool = False
    most: int = 0
    grows: int = 99
    warns: Callable[[R], bool] | None = None
    mark: str = ""

    def head_text(self, width: int) -> str:
        text = units.fit(self.head, width) if self.left else self.head.rjust(width)
        return text + " " * len(self.mark)

    def cell_text(self, row: R, width: int, *, warns: bool) -> str:
        text = "" if self.text is None else self.text(row)
        text = units.fit(text, width) if self.left else text.rjust(width)
        return text + (self.mark if warns else " " * len(self.mark))


# Draws a cell of a row in some columns of the terminal. The last argument is the style of the row
# under the cursor, None for the others.
Painter = Callable[[View, R, int, "Style | None"], list[Span]]


class Table(Scroller[R]):
    """A subclass calls `fit` before it draws. `painters`: of columns that are not plain text."""

    HEAD = 1
    FOOT = 1
    NOUN: ClassVar[str]  # what the rows are
    COLUMNS: ClassVar[Sequence[Column[Any]]]
    ORDERS: ClassVar[Sequence[str]]  # names; the first is the order in which the rows come

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.order = self.ORDERS[0]
        self.columns = self.COLUMNS  # that may be shown
        self.gap = " "  # before each column but the first
        self.widths: dict[Column[R], int] = {}  # of the columns that are shown, in order
        self.painters: dict[Column[R], Painter[R]] = {}

    def next_order(self) -> str:
        """Sorts by the next of ORDERS; returns its name."""
        self.order = self.ORDERS[(self.ORDERS.index(self.order) + 1) % len(self.ORDERS)]
        self.redraw()
        return self.order

    def entitle(self, total: int, match: str) -> None:
        """Sets the title: how many rows of `total` match a filter, and by what they are sorted."""
        title = f"{self.NOUN} · {len(self.rows)}"
        title += f" of {total} match “{match}”" if match else ""
        title += f" · by {self.order}" if self.order != self.ORDERS[0] else ""
        self.set_titles(title, self.range_text if self.rows else "")

    def double_clicked(self) -> None:
        self.app.simulate_key("enter")

    def mark_of(self, row: R) -> Span:
        """The character before a row that is not under the cursor."""
        return " ", self.ink_of(row)

    def ink_of(self, row: R) -> Style:
        """The style of a row that is not under the cursor."""
        return palette.TEXT_STYLE

    def remark_on(self, row: R) -> Span | None:
        """What stands in place of the figures of a row that has none."""
        return None

    def fit(self, rows: Sequence[R], width: int, *, pressure: bool) -> None:
        """Chooses the columns and their widths, the most important first."""
        columns = [c for c in self.columns if pressure or not c.pressure]
        steps = [(c.rank, False, n) for n, c in enumerate(columns)]
        steps += [(c.grows, True, n) for n, c in enumerate(columns) if c.most]
        widths = [0] * len(columns)
        room = width - 1 + len(self.gap)  # the first has a mark before it, and no gap
        is_full = False
        for _, is_growth, n in sorted(steps):
            column = columns[n]
            if is_growth and widths[n]:
                more = max(0, min(_wish(column, rows) - column.width, room))
                widths[n] += more
                room -= more
            elif not is_growth and not is_full:
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
        chosen = palette.CURSOR_STYLE if self.has_focus else palette.SELECTED_STYLE
        cursor = chosen if selected else None
        ink = cursor or self.ink_of(row)
        spans: list[Span] = [("›", ink) if selected else self.mark_of(row)]
        remark = self.remark_on(row)
        for number, (column, wide) in enumerate(self.widths.items()):
            spans.append((self.gap if number else "", ink))
            if remark is not None and number == NAMING:
                spans.append((remark[0], cursor or remark[1]))
                break
            painter = self.painters.get(column)
            if painter is not None:
                spans += painter(view, row, wide, cursor)
                continue
            warns = column.warns is not None and column.warns(row)
            style = palette.WARN_STYLE if warns and cursor is None else ink
            spans.append((column.cell_text(row, wide, warns=warns), style))
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
