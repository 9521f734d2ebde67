"""The request table: live and dead tokens, blocks held, packed bound, blocks of naive-evict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from vtoken.base.request_ids import short_id
from vtoken.sentences.request import gives
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import EMPTY, Line, Span, wrap
from vtoken_console.widgets.table import FILLS, Column, Table

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken.wire import RequestRow

ID: Column[RequestRow] = Column("id", 8, 0, lambda r: r.id, left=True)
FLOOR_LEGEND = "█ floor ▓ above ░ dead"
FLOOR: Column[RequestRow] = Column(
    "▓ above",
    8,
    1,
    None,
    left=True,
    pressure=True,
    most=len(FLOOR_LEGEND),
    grows=8,
    legend=FLOOR_LEGEND,
)
BLOCKS: Column[RequestRow] = Column(
    "", 12, FILLS, None, left=True, most=40, legend="█ bound ▓ held ░ naive"
)


def _number(
    head: str, width: int, rank: int, number: Callable[[RequestRow], int], *, summed: bool = False
) -> Column[RequestRow]:
    return Column(
        head, width, rank, lambda row: units.count(number(row)), total=number if summed else None
    )


COLUMNS: tuple[Column[RequestRow], ...] = (
    ID,
    Column("state", 9, 5, lambda r: r.state, left=True),
    _number("live", 6, 0, lambda r: r.live, summed=True),
    _number("dead", 6, 0, lambda r: r.dead, summed=True),
    FLOOR,
    Column(
        "gave",
        5,
        1,
        lambda r: units.short_count(r.given_tokens),
        total=lambda r: r.given_tokens,
        pressure=True,
    ),
    Column(
        "held",
        5,
        0,
        lambda r: units.count(r.blocks),
        total=lambda r: r.blocks,
        warns=lambda r: r.blocks > r.bound_blocks + 1,
    ),
    _number("bound", 5, 0, lambda r: r.bound_blocks, summed=True),
    _number("naive", 5, 1, lambda r: r.naive_blocks, summed=True),
    _number("output", 7, 4, lambda r: r.output_tokens, summed=True),
    _number("moved", 7, 6, lambda r: r.moved_tokens, summed=True),
    Column("policy", 14, 3, lambda r: r.policy, left=True),
    _number("budget", 7, 7, lambda r: r.budget_tokens),
    BLOCKS,
)

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


class Requests(Table["RequestRow"]):
    NOUN = "requests"
    COLUMNS: ClassVar[tuple[Column[RequestRow], ...]] = COLUMNS
    ORDERS: ClassVar[tuple[str, ...]] = tuple(SORTS)

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._scale = 1
        self.painters = {
            ID: lambda _, row, width, cursor: [
                (units.fit(short_id(row.id), width), cursor or self.ink_of(row))
            ],
            FLOOR: lambda view, row, width, _: floor_bar(row, width, ascii_only=view.ascii_only),
            BLOCKS: lambda view, row, width, _: blocks_bar(
                row, width, self._scale, ascii_only=view.ascii_only
            ),
        }

    def key_of(self, row: RequestRow) -> str:
        return row.id

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None:
            return []
        self.set_rows(sorted(view.filter.rows(view.model), key=SORTS[self.order]))
        self._scale = max((max(r.naive_blocks, r.blocks) for r in self.rows), default=1)
        status = view.model.status
        self.fit(self.rows, width, pressure=status is not None and status.pressure is not None)
        self.entitle(len(view.model.requests), view.filter.text if view.filter else "")
        if not self.rows:
            return _empty(view, view.filter.text, width, height)
        return super().build_lines(view, width, height)

    def mark_of(self, row: RequestRow) -> str:
        return " " if row.state == "running" else "~"

    def ink_of(self, row: RequestRow) -> Style:
        return palette.TEXT_STYLE if row.state == "running" else palette.MUTED_STYLE


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
