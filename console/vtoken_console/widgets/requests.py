"""The request table: live and dead tokens, blocks held, packed bound, blocks of naive-evict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.details.given import gives
from vtoken_console.widgets.lines import EMPTY, Line, Span, merge, wrap
from vtoken_console.widgets.scroller import Scroller

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken.wire import RequestRow


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` 0 is dropped last in a narrow panel; `total` is summed over the rows shown.

    `pressure`: shown only where requests give under pressure. `is_bar`: a bar instead of text, of
    at least `width` columns.
    """

    head: str
    width: int
    rank: int
    text: Callable[[RequestRow], str]
    total: Callable[[RequestRow], int] | None = None
    pressure: bool = False
    is_bar: bool = False


COLUMNS: tuple[Column, ...] = (
    Column("state", 9, 5, lambda r: r.state),
    Column("live", 6, 0, lambda r: units.count(r.live), lambda r: r.live),
    Column("dead", 6, 0, lambda r: units.count(r.dead), lambda r: r.dead),
    Column("▓ above", 8, 1, lambda _: "", pressure=True, is_bar=True),
    Column(
        "gave",
        5,
        1,
        lambda r: units.short_count(r.given_tokens),
        lambda r: r.given_tokens,
        pressure=True,
    ),
    Column("held", 5, 0, lambda r: units.count(r.blocks), lambda r: r.blocks),
    Column("bound", 5, 0, lambda r: units.count(r.bound_blocks), lambda r: r.bound_blocks),
    Column("naive", 5, 1, lambda r: units.count(r.naive_blocks), lambda r: r.naive_blocks),
    Column("output", 7, 4, lambda r: units.count(r.output_tokens), lambda r: r.output_tokens),
    Column("moved", 7, 6, lambda r: units.count(r.moved_tokens), lambda r: r.moved_tokens),
    Column("policy", 14, 3, lambda r: r.policy),
    Column("budget", 7, 7, lambda r: units.count(r.budget_tokens)),
)
NEEDED = 1  # columns up to this rank take precedence over the full id
ID_WIDTH = (8, 24)
BAR_WIDTH = 12
FLOOR_LEGEND = "█ floor ▓ above ░ dead"  # above a bar that is wide enough

SORTS: dict[str, Callable[[RequestRow], float]] = {
    "arrival": lambda _: 0.0,
    "excess blocks": lambda r: r.bound_blocks - r.blocks,
    "live": lambda r: -r.live,
    "dead": lambda r: -r.dead,
}


def blocks_bar(row: RequestRow, width: int, scale: int, *, ascii_only: bool) -> list[Span]:
    """The packed bound, the blocks held above it, and those naive-evict would hold, to scale."""
    values = (
        row.bound_blocks,
        max(row.blocks, row.bound_blocks),
        max(row.naive_blocks, row.blocks, row.bound_blocks),
    )
    return _stacked(values, width, scale, palette.WARN_STYLE, ascii_only=ascii_only)


def floor_bar(row: RequestRow, width: int, *, ascii_only: bool) -> list[Span]:
    """A request's floor, the live tokens above it, and the dead, as shares of all its tokens.

    Blank if it gives no tokens under pressure.
    """
    total = row.live + row.dead if gives(row) else 0
    values = (min(row.budget_tokens, row.live), row.live, total) if total else (0, 0, 0)
    return _stacked(values, width, total, palette.GOOD_STYLE, ascii_only=ascii_only)


def _stacked(
    values: tuple[int, int, int], width: int, scale: int, middle: Style, *, ascii_only: bool
) -> list[Span]:
    """A bar of three parts that end at `values`, which ascend; `middle` is the second's style."""
    glyphs = ("#", "+", ".") if ascii_only else (" ", "▓", "░")
    ends = [round(width * value / max(scale, 1)) for value in values]
    return [
        (glyphs[0] * ends[0], palette.style(palette.BAR, None if ascii_only else palette.BAR)),
        (glyphs[1] * (ends[1] - ends[0]), middle),
        (glyphs[2] * (ends[2] - ends[1]), palette.FAINT_STYLE),
        (" " * (width - ends[2]), palette.TEXT_STYLE),
    ]


class Requests(Scroller["RequestRow"]):
    HEAD = 1
    FOOT = 1

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.sort = "arrival"
        self._columns: list[Column] = []
        self._id_width = ID_WIDTH[0]
        self._bar_width = 0
        self._floor_width = 0
        self._scale = 1
        self._chosen_id: str | None = None

    def cursor_moved(self) -> None:
        self._chosen_id = self.chosen.id if self.chosen else None

    def double_clicked(self) -> None:
        self.app.simulate_key("enter")

    def next_sort(self) -> str:
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + 1) % len(names)]
        self.redraw()
        return self.sort

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None:
            return []
        everything = view.model.requests
        self.rows = sorted(view.filter.rows(view.model), key=SORTS[self.sort])
        found = next((i for i, r in enumerate(self.rows) if r.id == self._chosen_id), None)
        if found is not None:
            self.cursor = found
        status = view.model.status
        self._fit(width, pressure=status is not None and status.pressure is not None)
        title = f"requests · {len(self.rows)}"
        if view.filter:
            title += f" of {len(everything)} match “{view.filter.text}”"
        if self.sort != "arrival":
            title += f" · by {self.sort}"
        self.set_titles(title, self.range_text)
        if not self.rows:
            self.set_titles(title)
            return _empty(view, view.filter.text, width, height)
        return super().build_lines(view, width, height)

    def _fit(self, width: int, *, pressure: bool) -> None:
        longest = max((len(r.id) for r in self.rows), default=ID_WIDTH[0])
        self._id_width = min(max(longest, ID_WIDTH[0]), ID_WIDTH[1])
        columns = sorted((c for c in COLUMNS if pressure or not c.pressure), key=lambda c: c.rank)
        while columns:
            # Needed columns take precedence over the full id, all others do not.
            id_width = ID_WIDTH[0] if columns[-1].rank <= NEEDED else self._id_width
            if 1 + id_width + sum(c.width + 1 for c in columns) <= width:
                break
            columns.pop()
        self._columns = [c for c in COLUMNS if c in columns]
        used = 1 + sum(c.width + 1 for c in self._columns)
        self._floor_width = next((c.width for c in self._columns if c.is_bar), 0)
        wider = len(FLOOR_LEGEND) - self._floor_width
        if self._floor_width and width - used - self._id_width >= wider:
            self._floor_width, used = self._floor_width + wider, used + wider
        self._bar_width = 0
        if width - used - self._id_width > BAR_WIDTH:
            self._bar_width = min(40, width - used - self._id_width - 1)
        self._id_width = max(ID_WIDTH[0], min(self._id_width, width - used))
        self._scale = max((max(r.naive_blocks, r.blocks) for r in self.rows), default=1)

    def build_head(self, view: View, width: int) -> list[Line]:
        text = " " + "id".ljust(self._id_width)
        for column in self._columns:
            if column.is_bar:
                wide = self._floor_width >= len(FLOOR_LEGEND)
                text += " " + (FLOOR_LEGEND if wide else column.head).ljust(self._floor_width)
                continue
            left = column.head in ("state", "policy")
            text += " " + (
                column.head.ljust(column.width) if left else column.head.rjust(column.width)
            )
        if self._bar_width:
            legend = "# bound + held . naive" if view.ascii_only else "█ bound ▓ held ░ naive"
            text += " " + legend if self._bar_width >= len(legend) else ""
        return [((text, palette.MUTED_STYLE),)]

    def build_row(self, view: View, r: RequestRow, width: int, *, selected: bool) -> Line:
        style = palette.TEXT_STYLE
        if selected:
            style = palette.CURSOR_STYLE if self.has_focus else palette.SELECTED_STYLE
        waiting = r.state != "running"
        ink = style if selected else (palette.MUTED_STYLE if waiting else style)
        mark = "›" if selected else ("~" if waiting else " ")
        spans: list[Span] = [
            (mark + units.short_id(r.id, self._id_width).ljust(self._id_width), ink)
        ]
        for column in self._columns:
            if column.is_bar:
                spans.append((" ", ink))
                spans += floor_bar(r, self._floor_width, ascii_only=view.ascii_only)
                continue
            text = column.text(r)
            warn = column.head == "held" and r.blocks > r.bound_blocks + 1 and not selected
            left = column.head in ("state", "policy")
            cell = units.fit(text, column.width) if left else text.rjust(column.width)
            spans.append((" " + cell, palette.WARN_STYLE if warn else ink))
        if self._bar_width:
            spans.append((" ", palette.TEXT_STYLE))
            spans += blocks_bar(r, self._bar_width, self._scale, ascii_only=view.ascii_only)
        return merge(spans)

    def build_foot(self, view: View, width: int) -> list[Line]:
        text = " " + units.fit("sum", self._id_width)
        for column in self._columns:
            total = column.total
            value = 0 if total is None else sum(total(r) for r in self.rows)
            cell = "" if total is None else units.count(value)
            if len(cell) > column.width:
                cell = units.short_count(value, column.width)
            text += " " + cell.rjust(self._floor_width if column.is_bar else column.width)
        return [((text, palette.BOLD_STYLE),)]


def _empty(view: View, filter_text: str, width: int, height: int) -> list[Line]:
    muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
    if filter_text:
        spans = [
            (f" No request matches “{filter_text}”.  {view.key('filter')}, esc clears it.", muted)
        ]
        return [EMPTY, *wrap(spans, width, height - 1)]
    if view.replay is not None:
        return [EMPTY, ((" No request was running at this moment.", text),)][-height:]
    model = view.model.status.model if view.model and view.model.status else "MODEL"
    body = f'-d \'{{"model": "{model}",', '"prompt": "Once upon a time",', '"max_tokens": 512}\''
    command = [
        f"curl {view.url.rstrip('/')}/v1/completions \\",
        "-H 'Content-Type: application/json' \\",
        *([" ".join(body)] if len(" ".join(body)) + 3 <= width else body),
    ]
    lines: list[Line] = [
        ((" No request is running. Send one:", text),),
        *((("   " + part, palette.KEY_STYLE),) for part in command),
    ]
    return lines if height < len(lines) + 2 else [EMPTY, lines[0], EMPTY, *lines[1:]]
