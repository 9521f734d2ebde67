"""The log, newest first: a line for all that requests gave in a second, and one for each change.

What happens in every step (evictions, restores, moves, freed blocks, preemptions) is summed over a
second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vtoken.base.request_ids import short_id
from vtoken.sentences import clock, counted
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, cut, merge
from vtoken_console.widgets.scroller import Scroller

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken.wire import AuditEntry, Event

ROOM_FOR_NAMES = 70  # columns from which the requests that lost most are named
NAMED = 4


@dataclass(slots=True)
class Second:
    """What requests lost, moved and gave back within a second."""

    ts: float
    lost: Counter[str] = field(default_factory=Counter)  # tokens, by request; the most only
    num_requests: int = 0  # that lost tokens in one step, at most
    tokens: int = 0
    given: int = 0  # of the tokens: because memory was short
    parked: int = 0  # of the tokens: have a copy
    restored: int = 0  # tokens that came back
    moved: int = 0
    freed_blocks: int = 0
    preempted: int = 0
    swapped: int = 0  # of the preempted: wait in host memory, and are not computed again
    missing_blocks: int = 0  # for a compaction

    def add(self, event: Event) -> None:
        """Adds an event of `KINDS`."""
        data = event.data
        match event.kind:
            case "eviction":
                self.lost.update(data["largest"])
                self.num_requests = max(self.num_requests, data.get("requests", 0))
                self.tokens += data.get("tokens", 0)
                self.given += data.get("given", 0)
                self.parked += data.get("parked", 0)
            case "restored":
                self.restored += data.get("tokens", 0)
            case "relocation":
                self.moved += data.get("moved_tokens", 0)
                self.freed_blocks += data.get("freed_blocks", 0)
            case "reclaimed":
                self.freed_blocks += data.get("blocks", 0)
            case "preemption":
                self.preempted += 1
                self.swapped += bool(data.get("swapped_tokens"))
            case "deferred":
                missing = data.get("needed_blocks", 0) - data.get("available_blocks", 0)
                self.missing_blocks = max(self.missing_blocks, missing)

    @property
    def request_id(self) -> str:
        """The request that lost most."""
        return next((name for name, _ in self.lost.most_common(1)), "")

    def text(self, width: int) -> str:
        """In words, abbreviated if that makes it fit `width` columns."""
        text = ", ".join(self._parts(short=False))
        return text if len(text) <= width else ", ".join(self._parts(short=True))

    def _parts(self, *, short: bool) -> list[str]:
        many, blocks = max(self.num_requests, len(self.lost)), self.freed_blocks
        gave = self.given == self.tokens
        who = f"{many:,}" if short else counted(many, "request")
        verb = ("gave" if short else "gave up") if gave else "lost"
        back = f"{blocks:,} blk" if short else f"{counted(blocks, 'block')} back"
        swapped = f" ({self.swapped:,} swapped)" if self.swapped else ""
        parked = "all" if self.parked == self.tokens else f"{self.parked:,}"
        kept = f" ({parked} parked)" if self.parked and not short else ""
        parts = [
            f"{who} {verb} {self.tokens:,} tok{kept}" if self.tokens else "",
            f"{self.restored:,} tok restored" if self.restored else "",
            f"{self.moved:,} tok moved" if self.moved and not self.tokens else "",
            back if blocks else "",
            f"{self.preempted:,} preempted{swapped}" if self.preempted else "",
        ]
        missing = counted(self.missing_blocks, "block")
        return [part for part in parts if part] or [f"a compaction waited for {missing}"]

    @property
    def names(self) -> str:
        most = (f"{short_id(name)} {count:,}" for name, count in self.lost.most_common(NAMED))
        return ", ".join(most)


KINDS = frozenset({"eviction", "restored", "relocation", "reclaimed", "preemption", "deferred"})


def is_summed(event: Event) -> bool:
    """Whether an event is part of its second, not a line of its own."""
    return event.kind in KINDS and (event.kind != "eviction" or "largest" in event.data)


def grouped(events: Iterable[Event]) -> list[Event | Second]:
    """`events`, oldest first, as lines of the log, newest first."""
    seconds: dict[int, Second] = {}
    rows: list[Event | Second] = []
    for event in events:
        if not is_summed(event):
            rows.append(event)
            continue
        second = int(event.ts)
        if second not in seconds:
            rows.append(seconds.setdefault(second, Second(float(second))))
        seconds[second].add(event)
    return sorted(rows, key=lambda row: row.ts, reverse=True)


def _audit_events(events: Sequence[Event], audit: Sequence[AuditEntry]) -> list[Event]:
    """Audit entries of a recording without an event of their own, such as dry runs, as events."""
    if not audit:
        return []
    from vtoken.sentences import audit_text
    from vtoken.wire import Event

    known = {e.data.get("revision") for e in events if e.kind == "config"}
    operations = {e.data.get("id") for e in events if e.kind == "operation"}
    return [
        Event(
            seq=-n,  # distinguishes the rows; events have positive ones
            ts=entry.ts,
            step=0,
            kind="operation",
            summary=f"{entry.action}{' (dry run)' if entry.dry_run else ''} by {entry.actor}: "
            + audit_text(entry, "→"),
            data={},
        )
        for n, entry in enumerate(audit, 1)
        if entry.dry_run or entry.revision not in known
        if entry.changes.get("operation", [None])[-1] not in operations
    ]


class Log(Scroller["Event | Second"]):
    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._source: tuple[object, object] = (None, None)

    @property
    def request_id(self) -> str:
        """The request of the line under the cursor; "" if it is of none."""
        row = self.chosen
        if row is None or isinstance(row, Second):
            return row.request_id if row is not None else ""
        return str(row.data.get("request_id") or "")

    def key_of(self, row: Event | Second) -> Hashable:
        return row.ts if isinstance(row, Second) else ("event", row.seq)

    def cursor_moved(self) -> None:
        # On the top row the cursor follows the newest event; elsewhere it stays on its event.
        self.choose(self.key_of(self.chosen) if self.chosen and self.cursor > 0 else None)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None:
            return []
        source = (view.model.events, view.audit)
        if self._source[0] is not source[0] or self._source[1] is not source[1]:
            self._source = source
            self.set_rows(grouped((*view.model.events, *_audit_events(*source))))
        missed = view.model.missed_events
        self.set_titles("log" + (f" · {missed:,} missed" if missed else ""), self.range_text)
        return super().build_lines(view, width, height)

    def build_row(self, view: View, row: Event | Second, width: int, *, selected: bool) -> Line:
        names = ""
        if isinstance(row, Second):
            (glyph, style), text = _glyph(row), row.text(width - 12)
            if width >= ROOM_FOR_NAMES and row.lost:
                names = f": {row.names}"
        else:
            glyph, style = event_glyph(row)
            text = row.summary.replace(" -> ", " → ")
        if selected and self.has_focus:
            line = f" {clock(row.ts)} {glyph} {text}{names}"
            return ((units.fit(line, width), palette.CURSOR_STYLE),)
        spans: list[Span] = [
            (f" {clock(row.ts)} ", palette.FAINT_STYLE),
            (f"{glyph} ", style),
            (text, palette.TEXT_STYLE),
            (names, palette.MUTED_STYLE),
        ]
        return merge(cut(spans, width))


def _glyph(row: Second) -> tuple[str, Style]:
    amounts = {
        "preemption": row.preempted,
        "eviction": row.tokens,
        "restored": row.restored,
        "relocation": row.moved,
        "reclaimed": row.freed_blocks,
    }
    return palette.EVENT_STYLES[next((kind for kind, n in amounts.items() if n), "deferred")]


def event_glyph(event: Event) -> tuple[str, Style]:
    """The mark of an event; that of a configuration change is the one in the charts."""
    from vtoken_console.feed.samples import marker_of

    marker = marker_of(event)
    if marker is not None:
        return palette.MARKER_STYLES[marker.kind]
    return palette.EVENT_STYLES.get(event.kind, ("·", palette.MUTED_STYLE))
