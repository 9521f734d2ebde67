"""The table of the fleet page: a row an engine, figures that are out of balance marked.

It is not Textual's DataTable, which renders every visible cell again when one of them changes: 60
rows with strips of 100 cells take it 0.2 s of CPU time, and here some cell changes in every frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from vtoken_console.frame.fleet import ORDERS, FleetRow, FleetView, matches, ordered
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.breakpoints import NARROW_BELOW, WIDE_FROM
from vtoken_console.widgets.fleet.strip import Strips
from vtoken_console.widgets.lines import EMPTY, Line, Span, merge
from vtoken_console.widgets.scroller import Scroller

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken import wire
    from vtoken.sentences import Fault

LABEL_WIDTH = (6, 22)
POLICY_WIDTH = (6, 14)
STATE_WIDTH = (8, 14)  # on a narrow terminal, on any other
POOL_WIDTH = (8, 160)
REORDER_S = 3.0  # between two sorts, so that rows stay long enough to be read
MARKS: dict[Fault, str] = {
    "waiting": "▲",
    "memory": "▼",
    "latency": "▲",
    "drift": "≠",
    "version": "≠",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a row that has a status. `fault`: marked if the row has it; `rank` 0 is dropped
    last.
    """

    head: str
    width: int
    rank: int
    text: Callable[[FleetRow, wire.Status], str]
    fault: Fault | None = None
    total: Callable[[FleetRow, wire.Status], float] | None = None
    left: bool = False
    pressure: bool = False  # only where requests give under pressure


def _count(value: float, width: int) -> str:
    text = units.count(value)
    return text if len(text) <= width else units.short_count(value, width).strip()


def _p95(latency: wire.Latency | None, name: str) -> str:
    ms = None if latency is None else getattr(latency, name).p95_ms
    return f"{ms:.0f} ms" if ms is not None and 99.95 > ms >= 9.95 else units.latency(ms).strip()


def _drift(row: FleetRow, _: wire.Status) -> str:
    return ", ".join(row.drift)


COLUMNS: tuple[Column, ...] = (
    Column("F", 4, 0, lambda _, s: f"{s.fragmentation.f:.2f}"),
    Column("θ", 4, 6, lambda _, s: f"{s.fragmentation.theta_f:.2f}"),
    Column(
        "short",
        5,
        3,
        lambda _, s: "" if s.pressure is None else _count(s.pressure.short_blocks, 5),
        total=lambda _, s: 0 if s.pressure is None else s.pressure.short_blocks,
        pressure=True,
    ),
    Column(
        "free", 6, 0, lambda _, s: _count(s.blocks.free, 6), "memory", lambda _, s: s.blocks.free
    ),
    Column(
        "blocks", 6, 5, lambda _, s: _count(s.blocks.total, 6), None, lambda _, s: s.blocks.total
    ),
    Column(
        "run",
        4,
        0,
        lambda _, s: _count(s.requests.running, 4),
        None,
        lambda _, s: s.requests.running,
    ),
    Column(
        "wait",
        4,
        0,
        lambda _, s: _count(s.requests.waiting, 4),
        "waiting",
        lambda _, s: s.requests.waiting,
    ),
    Column(
        "tok/s",
        6,
        0,
        lambda r, _: _count(r.tokens_per_s, 6),
        None,
        lambda r, _: r.tokens_per_s if r.answers else 0.0,
    ),
    Column("ITL p95", 7, 0, lambda _, s: _p95(s.latency, "inter_token"), "latency"),
    Column("TTFT p95", 8, 7, lambda _, s: _p95(s.latency, "ttft")),
    Column(
        "preempted",
        9,
        9,
        lambda _, s: _count(s.requests.preempted, 9),
        None,
        lambda _, s: s.requests.preempted,
    ),
    Column("step", 8, 8, lambda _, s: units.latency(s.step_ms or None)),
    Column("policy", POLICY_WIDTH[0], 1, lambda _, s: s.policy.name, left=True),
    Column("rev", 4, 0, lambda r, _: _count(r.revision, 4), "drift"),
    Column("differs in", 22, 4, _drift, left=True),
)


class FleetTable(Scroller["FleetRow"]):
    HEAD = 1
    FOOT = 1

    class Opened(Message):
        """A row was opened by the mouse."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.order = ORDERS[0]
        self.filter = ""
        self._columns: list[Column] = []
        self._layout: tuple[object, ...] = ()
        self._label_width = LABEL_WIDTH[0]
        self._state_width = STATE_WIDTH[0]
        self._policy_width = POLICY_WIDTH[0]
        self._pool_width = 0
        self._gap = " "  # before each column
        self._pools = Strips()
        self._built: dict[
            object, tuple[object, Line]
        ] = {}  # a row's key -> what it shows, its line
        self._chosen_key: tuple[str, int | None] | None = None
        self._places: dict[tuple[str, int | None], int] = {}
        self._placed = -REORDER_S  # when the rows were sorted, monotonic [s]

    # ------------------------------------------------------------ order, filter, cursor

    def choose(self, key: tuple[str, int | None]) -> None:
        """Puts the cursor on this row."""
        self._chosen_key = key
        self.redraw()

    def next_order(self) -> str:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self._places = {}
        self.redraw()
        return self.order

    def set_filter(self, text: str) -> None:
        self.filter = text.strip()
        self.redraw()

    def cursor_moved(self) -> None:
        self._chosen_key = self.chosen.key if self.chosen is not None else None

    def double_clicked(self) -> None:
        self.post_message(self.Opened())

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
        self.rows = [row for row in everything if not self.filter or matches(row, self.filter)]
        found = next((n for n, row in enumerate(self.rows) if row.key == self._chosen_key), None)
        if found is not None:
            self.cursor = found
        title = f"engines · {len(self.rows)}"
        if self.filter:
            title += f" of {len(everything)} match “{self.filter}”"
        if self.order != ORDERS[0]:
            title += f" · by {self.order}"
        self._fit(everything, width)
        self.set_titles(title, self.range_text)
        if not self.rows:
            self.set_titles(title)
            text = f" No engine matches “{self.filter}”.  / changes the filter, esc clears it."
            return [EMPTY, ((text, palette.MUTED_STYLE),)]
        lines = super().build_lines(view, width, height)
        self.cursor_moved()
        end = self.HEAD + min(len(self.rows), self.page_rows)
        return [*lines[:end], *lines[-self.FOOT :], *lines[end : -self.FOOT]]  # sums below the rows

    def _fit(self, rows: list[FleetRow], width: int) -> None:
        """Chooses the columns, the most important first; what is left is the pool's."""
        known = [row.status for row in rows if row.status is not None]
        pressure = any(status.pressure is not None for status in known)
        label = max((len(row.label) for row in rows), default=0)
        self._label_width = max(LABEL_WIDTH[0], min(label, LABEL_WIDTH[1]))
        self._state_width = STATE_WIDTH[width >= NARROW_BELOW]
        policy = max((len(status.policy.name) for status in known), default=0)
        columns = sorted((c for c in COLUMNS if pressure or not c.pressure), key=lambda c: c.rank)
        self._gap = "  " if width >= WIDE_FROM - 2 else " "
        begin = 1 + self._label_width + 1 + self._state_width
        room = width - begin - len(self._gap) - POOL_WIDTH[0]
        while columns and sum(map(self._room, columns)) > room:
            columns.pop()
        self._columns = [column for column in COLUMNS if column in columns]
        left = room + POOL_WIDTH[0] - sum(map(self._room, self._columns))
        self._policy_width = max(POLICY_WIDTH[0], min(policy, POLICY_WIDTH[1]))
        self._policy_width = min(self._policy_width, POLICY_WIDTH[0] + left - POOL_WIDTH[0])
        left -= self._policy_width - POLICY_WIDTH[0]
        self._pool_width = min(max(left, 0), POOL_WIDTH[1])
        self._layout = (
            *(column.head for column in self._columns),
            *(self._label_width, self._state_width, self._policy_width, self._pool_width),
            self._gap,
        )

    def _room(self, column: Column) -> int:
        """The columns of the terminal that a column takes at least, with its gap and its mark."""
        return column.width + len(self._gap) + (column.fault is not None)

    def _width(self, column: Column) -> int:
        return self._policy_width if column.head == "policy" else column.width

    def build_head(self, view: View, width: int) -> list[Line]:
        several = view.fleet is not None and view.fleet.num_servers > 1
        text = " " + units.fit("server" if several else "engine", self._label_width)
        text += " " + units.fit("state", self._state_width)
        for column in self._columns:
            head, wide = column.head, self._width(column)
            text += self._gap + (units.fit(head, wide) if column.left else head.rjust(wide))
            text += " " * (column.fault is not None)
        text += self._gap + units.fit("pool", self._pool_width)
        return [((text, palette.MUTED_STYLE),)]

    def build_row(self, view: View, row: FleetRow, width: int, *, selected: bool) -> Line:
        """The line of a row, built again only if it shows something else."""
        shown = (
            (row.version, row.condition, int(row.since_s), row.problem, row.faults, [*row.drift]),
            (selected and (1 + self.has_focus), width, view.theme, view.ramp, self._layout),
        )
        known = self._built.get(row.key)
        if known is None or known[0] != shown:
            line = self._row_line(view, row, width, selected=selected)
            known = self._built[row.key] = shown, line
        return known[1]

    def _row_line(self, view: View, row: FleetRow, width: int, *, selected: bool) -> Line:
        ink = palette.TEXT_STYLE if row.answers else palette.MUTED_STYLE
        if selected:
            ink = palette.CURSOR_STYLE if self.has_focus else palette.SELECTED_STYLE
        mark, state, color = _state(row, wide=self._state_width > STATE_WIDTH[0])
        spans: list[Span] = [
            ("›" if selected else " ", ink),
            (units.fit(row.label, self._label_width) + " ", ink),
            (units.fit(f"{mark} {state}", self._state_width), ink if selected else color),
        ]
        status = row.status
        if status is None:
            rest = width - sum(len(text) for text, _ in spans) - 1
            problem = palette.MUTED_STYLE if row.answers else palette.BAD_STYLE
            spans.append((" " + units.fit(row.problem, rest), ink if selected else problem))
            return merge(spans)
        for column in self._columns:
            spans += self._cell(column, row, status, ink, selected=selected)
        if not self._pool_width:
            return merge(spans)
        spans.append((self._gap, ink))
        if row.answers:
            return merge([*spans, *self._pools.strip(row, view, self._pool_width)])
        why = units.fit(row.problem if self._pool_width > POOL_WIDTH[0] else "", self._pool_width)
        return merge([*spans, (why, ink if selected else palette.BAD_STYLE)])

    def _cell(
        self, column: Column, row: FleetRow, status: wire.Status, ink: Style, *, selected: bool
    ) -> list[Span]:
        wide = self._width(column)
        text = column.text(row, status)
        if column.head == "tok/s" and not row.answers:
            text = "–"
        text = units.fit(text, wide) if column.left else text.rjust(wide)
        if column.fault is None:
            return [(self._gap + text, ink)]
        if column.fault not in row.faults:
            return [(self._gap + text + " ", ink)]
        text = self._gap + text + MARKS[column.fault]
        return [(text, ink if selected else palette.WARN_STYLE)]

    def build_foot(self, view: View, width: int) -> list[Line]:
        text = " " + units.fit("sum", self._label_width) + " " * (1 + self._state_width)
        for column in self._columns:
            total, wide, cell = column.total, self._width(column), ""
            if total is not None:
                known = [(row, row.status) for row in self.rows if row.status is not None]
                cell = _count(sum(total(row, status) for row, status in known), wide)
            text += self._gap + cell.rjust(wide) + " " * (column.fault is not None)
        return [((text, palette.BOLD_STYLE),)]


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
