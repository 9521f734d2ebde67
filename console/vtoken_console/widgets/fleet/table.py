"""The table of the fleet page: a row an engine, figures that are out of balance marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from vtoken.sentences import budget_text
from vtoken_console.frame.fleet import ORDERS, FleetRow, FleetView, matches, ordered
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.breakpoints import WIDE_FROM
from vtoken_console.widgets.fleet.strip import Strips
from vtoken_console.widgets.lines import EMPTY, Line, Span, cut, merge
from vtoken_console.widgets.table import Column, Table

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken import wire
    from vtoken.sentences import Fault

REORDER_S = 3.0  # between two sorts, so that rows stay long enough to be read
MARKS: dict[Fault, str] = {
    "waiting": "▲",
    "memory": "▼",
    "latency": "▲",
    "drift": "≠",
    "version": "≠",
}


def _of(
    head: str,
    width: int,
    rank: int,
    text: Callable[[wire.Status], str],
    *,
    fault: Fault | None = None,
    pressure: bool = False,
) -> Column[FleetRow]:
    """A fact of a row's status."""
    return Column(
        head,
        width,
        rank,
        lambda row: "" if row.status is None else text(row.status),
        pressure=pressure,
        warns=None if fault is None else lambda row: fault in row.faults,
        mark="" if fault is None else MARKS[fault],
    )


def _number(
    head: str,
    width: int,
    rank: int,
    number: Callable[[wire.Status], float],
    *,
    fault: Fault | None = None,
    pressure: bool = False,
) -> Column[FleetRow]:
    """A number of a row's status, which is summed over the rows."""
    column = _of(
        head,
        width,
        rank,
        lambda status: units.brief_count(number(status), width),
        fault=fault,
        pressure=pressure,
    )
    return replace(column, total=lambda row: 0 if row.status is None else number(row.status))


def _p95(latency: wire.Latency | None, name: str) -> str:
    ms = None if latency is None else getattr(latency, name).p95_ms
    return f"{ms:.0f} ms" if ms is not None and 99.95 > ms >= 9.95 else units.latency(ms).strip()


def _missing(status: wire.Status) -> int:
    return 0 if status.pressure is None else status.pressure.short_blocks


def _policy(status: wire.Status) -> str:
    """`keydiff, floor 50% of prompt`, as in the header of the dashboard."""
    name = status.policy.name
    return name if name == "none" else f"{name}, {budget_text(status).partition(',')[0]}"


STATE: Column[FleetRow] = Column("state", 8, 0, None, left=True, most=14, grows=2)
POOL: Column[FleetRow] = Column("pool", 8, 0, None, left=True, most=1000)
COLUMNS: tuple[Column[FleetRow], ...] = (
    Column("engine", 6, 0, lambda row: row.label, left=True, most=22, grows=0),
    STATE,
    _of("holes", 5, 6, lambda s: f"{s.fragmentation.f:.0%}"),
    _number("missing", 7, 0, _missing, pressure=True),
    _number("free", 6, 0, lambda s: s.blocks.free, fault="memory"),
    _number("blocks", 6, 5, lambda s: s.blocks.total),
    _number("run", 4, 0, lambda s: s.requests.running),
    _number("wait", 4, 0, lambda s: s.requests.waiting, fault="waiting"),
    Column(
        "tok/s",
        6,
        0,
        lambda row: units.brief_count(row.tokens_per_s, 6) if row.answers else "–",
        total=lambda row: row.tokens_per_s if row.answers else 0.0,
    ),
    _of("ITL p95", 7, 0, lambda s: _p95(s.latency, "inter_token"), fault="latency"),
    _of("TTFT p95", 8, 7, lambda s: _p95(s.latency, "ttft")),
    _number("preempted", 9, 9, lambda s: s.requests.preempted),
    _of("step", 8, 8, lambda s: units.latency(s.step_ms or None)),
    Column(
        "policy",
        6,
        1,
        lambda row: "" if row.status is None else _policy(row.status),
        left=True,
        most=34,
        grows=3,
    ),
    Column(
        "rev",
        4,
        0,
        lambda row: units.brief_count(row.revision, 4),
        warns=lambda row: "drift" in row.faults,
        mark=MARKS["drift"],
    ),
    Column("differs in", 22, 7, lambda row: ", ".join(row.drift), left=True),
    POOL,
)


class FleetTable(Table["FleetRow"]):
    NOUN = "engines"
    COLUMNS: ClassVar[tuple[Column[FleetRow], ...]] = COLUMNS
    ORDERS: ClassVar[tuple[str, ...]] = ORDERS

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.filter = ""
        self.painters = {STATE: self._paint_state, POOL: self._paint_pool}
        self._pools = Strips()
        self._built: dict[object, tuple[object, Line]] = {}  # key -> what a row shows, its line
        self._layout: tuple[object, ...] = ()
        self._places: dict[tuple[str, int | None], int] = {}
        self._placed = -REORDER_S  # when the rows were sorted, monotonic [s]

    # ------------------------------------------------------------ order, filter, cursor

    def key_of(self, row: FleetRow) -> tuple[str, int | None]:
        return row.key

    def next_order(self) -> str:
        self._places = {}
        return super().next_order()

    def set_filter(self, text: str) -> None:
        self.filter = text.strip()
        self.redraw()

    def _placed_rows(self, fleet: FleetView, monotonic: float) -> list[FleetRow]:
        """The rows in order; a new order of the same rows every REORDER_S at most."""
        rows = fleet.rows
        late = monotonic - self._placed >= REORDER_S and self.order != ORDERS[0]
        if late or any(row.key not in self._places for row in rows):
            self._placed = monotonic
            self._places = {row.key: n for n, row in enumerate(ordered(rows, self.order))}
        return sorted(rows, key=lambda row: self._places[row.key])

    # ------------------------------------------------------------ lines

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        fleet = view.fleet
        if fleet is None:
            return []
        everything = self._placed_rows(fleet, view.monotonic)
        self.set_rows([row for row in everything if not self.filter or matches(row, self.filter)])
        statuses = [row.status for row in everything if row.status is not None]
        pressure = any(status.pressure is not None for status in statuses)
        self.gap = "  " if width >= WIDE_FROM - 2 else " "
        self.fit(everything, width, pressure=pressure)
        self._layout = (*self.widths.items(), view.theme, view.ramp)
        self.entitle(len(everything), self.filter)
        if not self.rows:
            text = f" No engine matches “{self.filter}”.  / changes the filter, esc clears it."
            return [EMPTY, ((text, palette.MUTED_STYLE),)]
        self.row_lines = 2 if 2 * len(self.rows) <= height - self.HEAD - self.FOOT else 1
        lines = super().build_lines(view, width, height)
        self.cursor_moved()
        end = self.HEAD + min(len(self.rows), self.page_rows)
        shown = lines[self.HEAD : end]
        if self.row_lines > 1:  # there is room for what each engine says
            said = [self._said(row, width) for row in self.rows]
            shown = [line for pair in zip(shown, said, strict=True) for line in pair]
        return [*lines[: self.HEAD], *shown, *lines[-self.FOOT :]]  # sums below the rows

    @staticmethod
    def _said(row: FleetRow, width: int) -> Line:
        """The sentence of a row's engine."""
        if row.status is None:
            return EMPTY
        found = row.status.fragmentation
        style = palette.MUTED_STYLE if found.cause == "ok" else palette.WARN_STYLE
        return merge(cut([(f"   {found.sentence}", style)], width))

    def build_row(self, view: View, row: FleetRow, width: int, *, selected: bool) -> Line:
        """The line of a row, built again only if it shows something else: once a second."""
        shown = (
            (row.version, row.condition, int(row.since_s), row.problem, row.faults, [*row.drift]),
            (selected and (1 + self.has_focus), width, self._layout),
        )
        known = self._built.get(row.key)
        if known is None or known[0] != shown:
            line = super().build_row(view, row, width, selected=selected)
            known = self._built[row.key] = shown, line
        return known[1]

    def ink_of(self, row: FleetRow) -> Style:
        return palette.TEXT_STYLE if row.answers else palette.MUTED_STYLE

    def remark_on(self, row: FleetRow) -> Span | None:
        if row.status is not None:
            return None
        return row.problem, palette.MUTED_STYLE if row.answers else palette.BAD_STYLE

    def _paint_state(
        self, view: View, row: FleetRow, width: int, cursor: Style | None
    ) -> list[Span]:
        glyph, words, style = _state(row, wide=width > STATE.width)
        return [(units.fit(f"{glyph} {words}", width), cursor or style)]

    def _paint_pool(
        self, view: View, row: FleetRow, width: int, cursor: Style | None
    ) -> list[Span]:
        if row.answers:
            return [*self._pools.strip(row, view, width)]
        why = units.fit(row.problem if width > POOL.width else "", width)
        return [(why, cursor or palette.BAD_STYLE)]


def _state(row: FleetRow, *, wide: bool) -> tuple[str, str, Style]:
    """Glyph, words and style of a row's condition."""
    if row.condition == "live":
        return "●", "live", palette.GOOD_STYLE
    if row.condition == "starting":
        return "○", "connecting" if wide else "starts", palette.MUTED_STYLE
    if row.condition == "paused":
        return "‖", "paused", palette.WARN_STYLE
    since = short_duration(row.since_s)
    if row.condition == "refused":
        since = row.problem[:3] if row.problem[:3].isdigit() else since
    return "×", f"{row.condition} {since}" if wide else since, palette.BAD_STYLE


def short_duration(seconds: float) -> str:
    """At most six columns: `12 s`, `3 min`, `2 h`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
