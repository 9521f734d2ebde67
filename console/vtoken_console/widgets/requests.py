"""The request table: who waits and for how long, who paid, what each can still give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from vtoken.base.request_ids import short_id
from vtoken.sentences import span
from vtoken.sentences.request import gives, live_share, waited_s
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.ramp import ink_on
from vtoken_console.widgets.lines import EMPTY, Line, Span, wrap
from vtoken_console.widgets.table import Column, Table

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken.wire import RequestRow

ID: Column[RequestRow] = Column("id", 8, 0, lambda r: short_id(r.id), left=True, most=16, grows=2)
OWNER: Column[RequestRow] = Column("", 1, 0, None)  # the letter of its blocks in the map
AGE: Column[RequestRow] = Column("age", 6, 3, None)
WAITED: Column[RequestRow] = Column("waited", 6, 1, None)
KEPT: Column[RequestRow] = Column("kept", 12, 1, None, left=True, most=24, grows=4)
BLOCKS: Column[RequestRow] = Column("blocks", 8, 1, None)
NOTHING = "–"
COLUMNS: tuple[Column[RequestRow], ...] = (
    OWNER,
    ID,
    Column("state", 9, 0, lambda r: r.state, left=True),
    AGE,
    WAITED,
    Column("prompt+out", 10, 2, lambda r: _lengths(r)),
    KEPT,
    Column(
        "can give",
        8,
        1,
        lambda r: _can_give(r),
        pressure=True,
    ),
    BLOCKS,
    Column("gave up", 7, 4, lambda r: _gave_up(r), pressure=True, most=13, grows=5),
    Column("floor", 7, 5, lambda r: units.short_count(r.budget_tokens), pressure=True),
    Column("moved", 7, 7, lambda r: units.short_count(r.moved_tokens)),
    Column("policy", 14, 5, lambda r: r.policy, left=True),
    Column("preempted", 9, 6, lambda r: units.count(r.preemptions)),
)


def waits(row: RequestRow) -> bool:
    return row.state in ("waiting", "preempted")


def _by_wait(row: RequestRow) -> float:
    since = row.waiting_since_ts
    return -row.waited_s if since is None else since - 1e12  # the waiting ones first


SORTS: dict[str, Callable[[RequestRow], float]] = {
    "arrival": lambda _: 0.0,
    "wait": _by_wait,
    "kept": lambda row: 2.0 if (kept := live_share(row)) is None else kept,
    "gave up": lambda row: -row.given_tokens,
}


def _lengths(row: RequestRow) -> str:
    """Tokens of prompt and answer: 512+95."""
    text = f"{row.prompt_tokens}+{row.output_tokens}"
    if len(text) <= 10:
        return text
    return "+".join(units.short_count(n, 0) for n in (row.prompt_tokens, row.output_tokens))


def _can_give(row: RequestRow) -> str:
    return NOTHING if waits(row) else units.count(row.givable_tokens)


def _gave_up(row: RequestRow) -> str:
    """Tokens that left because memory was short, and how many are parked: 1440 (1.2k)."""
    parked = f" ({units.short_count(row.parked_tokens, 0)})" if row.parked_tokens else ""
    return units.short_count(row.given_tokens) + parked


def floor_bar(row: RequestRow, width: int, *, ascii_only: bool) -> list[Span]:
    """A request's floor, the live tokens above it, the parked and the dead, as shares of all its
    tokens.

    One that does not give for others has no floor: its live tokens, and those that are not.
    """
    total = row.live + row.dead
    floor = min(row.budget_tokens, row.live) if gives(row) else row.live
    parts = (floor, row.live, row.live + row.parked_tokens, total)
    glyphs = ("#", "+", ":", ".") if ascii_only else (" ", "▓", "▒", "░")
    ends = [round(width * value / max(total, 1)) for value in parts]
    return [
        (glyphs[0] * ends[0], palette.style(palette.BAR, None if ascii_only else palette.BAR)),
        (glyphs[1] * (ends[1] - ends[0]), palette.GOOD_STYLE),
        (glyphs[2] * (ends[2] - ends[1]), palette.style(palette.PARKED)),
        (glyphs[3] * (ends[3] - ends[2]), palette.FAINT_STYLE),
        (" " * (width - ends[3]), palette.TEXT_STYLE),
    ]


class Requests(Table["RequestRow"]):
    NOUN = "requests"
    FOOT = 0
    COLUMNS: ClassVar[tuple[Column[RequestRow], ...]] = COLUMNS
    ORDERS: ClassVar[tuple[str, ...]] = tuple(SORTS)

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.order = "wait"
        self.lettered = False  # with the letter that a request's blocks have in the map
        self.painters = {
            OWNER: self._owner,
            AGE: self._age,
            WAITED: self._waited,
            KEPT: self._kept,
            BLOCKS: self._blocks,
        }

    def key_of(self, row: RequestRow) -> str:
        return row.id

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None:
            return []
        self.set_rows(sorted(view.filter.rows(view.model), key=SORTS[self.order]))
        self.columns = self.COLUMNS[0 if self.lettered else 1 :]
        status = view.model.status
        self.fit(self.rows, width, pressure=status is not None and status.pressure is not None)
        self.entitle(len(view.model.requests), view.filter.text if view.filter else "")
        if view.filter.problem:
            self.set_titles(f"{self.NOUN} · {view.filter.problem}", self.range_text)
        if not self.rows:
            return _empty(view, view.filter.text, width, height)
        return super().build_lines(view, width, height)

    def mark_of(self, row: RequestRow) -> Span:
        return ("!", palette.WARN_STYLE) if waits(row) else super().mark_of(row)

    def ink_of(self, row: RequestRow) -> Style:
        return palette.MUTED_STYLE if row.state == "idle" else palette.TEXT_STYLE

    # ------------------------------------------------------------ cells

    def _owner(self, view: View, row: RequestRow, width: int, cursor: Style | None) -> list[Span]:
        from vtoken_console.widgets.heatmap.cell_paint import letter_of

        if not row.number:
            return [(" ", cursor or palette.TEXT_STYLE)]
        back = view.theme.hue(row.number)
        ink = palette.style(ink_on(back), back) if view.ramp.colors else palette.TEXT_STYLE
        return [(letter_of(row.number), ink)]

    def _age(self, view: View, row: RequestRow, width: int, cursor: Style | None) -> list[Span]:
        known = row.arrived_ts > 0
        text = span(max(0.0, view.server_now - row.arrived_ts)) if known else NOTHING
        return [(text.rjust(width), cursor or self.ink_of(row))]

    def _waited(self, view: View, row: RequestRow, width: int, cursor: Style | None) -> list[Span]:
        if row.waiting_since_ts is not None:
            text = span(waited_s(row, view.server_now))
            return [(text.rjust(width), cursor or palette.WARN_STYLE)]
        text = f"{row.waited_s:.1f} s" if row.waited_s < 100 else span(row.waited_s)
        text = text if row.waited_s >= 0.05 else NOTHING
        return [(text.rjust(width), cursor or self.ink_of(row))]

    def _kept(self, view: View, row: RequestRow, width: int, cursor: Style | None) -> list[Span]:
        kept = live_share(row)
        if kept is None:
            return [(NOTHING.rjust(4).ljust(width), cursor or palette.MUTED_STYLE)]
        # Rounded down: a request that gave anything did not keep all.
        share = (f"{math.floor(kept * 100)}% ".rjust(5), cursor or self.ink_of(row))
        return [share, *floor_bar(row, width - 5, ascii_only=view.ascii_only)]

    def _blocks(self, view: View, row: RequestRow, width: int, cursor: Style | None) -> list[Span]:
        if waits(row) and row.needed_blocks:
            status = view.model.status if view.model else None
            lacks = status is not None and status.requests.first is not None
            text = f"needs {row.needed_blocks}"
            style = palette.WARN_STYLE if lacks else self.ink_of(row)
        else:
            text, style = units.count(row.blocks), self.ink_of(row)
        return [(text.rjust(width), cursor or style)]


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
