"""The log: relocations, configuration changes and other events, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vtoken.base.request_ids import short_id
from vtoken.sentences import clock
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, cut, merge
from vtoken_console.widgets.scroller import Scroller

if TYPE_CHECKING:
    from vtoken.wire import AuditEntry, Event

QUIET_KINDS = frozenset({"eviction", "reclaimed"})  # frequent: one every few steps


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


class Events(Scroller["Event"]):
    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.all_kinds = False
        self._source: tuple[object, object] = (None, None)

    def toggle_kinds(self) -> bool:
        """Switches between all kinds and moves and changes; returns whether all are shown."""
        self.all_kinds = not self.all_kinds
        self._source = (None, None)
        self.redraw()
        return self.all_kinds

    def key_of(self, row: Event) -> int:
        return row.seq

    def cursor_moved(self) -> None:
        # On the top row the cursor follows the newest event; elsewhere it stays on its event.
        self.choose(self.chosen.seq if self.chosen and self.cursor > 0 else None)

    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        if view.model is None:
            return []
        source = (view.model.events, view.audit)
        if self._source[0] is not source[0] or self._source[1] is not source[1]:
            self._source = source
            rows = [
                e
                for e in reversed(view.model.events)
                if self.all_kinds or e.kind not in QUIET_KINDS
            ]
            rows += _audit_events(*source)
            self.set_rows(sorted(rows, key=lambda e: e.ts, reverse=True))
        kinds = "all events" if self.all_kinds else "moves and changes"
        missed = view.model.missed_events
        title = kinds + (f" · {missed:,} missed" if missed else "")
        self.set_titles(title, self.range_text)
        return super().build_lines(view, width, height)

    def build_row(self, view: View, event: Event, width: int, *, selected: bool) -> Line:
        summary = event.summary
        if len(summary) + 12 > width and {"moved_tokens", "freed_blocks"} <= event.data.keys():
            summary = (
                f"{units.count(event.data['moved_tokens'])} tok of "
                f"{short_id(str(event.data.get('request_id')))}, "
                f"freed {units.count(event.data['freed_blocks'])} blk"
            )
        glyph, style = palette.EVENT_STYLES.get(event.kind, ("·", palette.MUTED_STYLE))
        if selected and self.has_focus:
            line = f" {clock(event.ts)} {glyph} {summary}"
            return ((units.fit(line, width), palette.CURSOR_STYLE),)
        quiet = event.kind in QUIET_KINDS
        spans: list[Span] = [
            (f" {clock(event.ts)} ", palette.FAINT_STYLE),
            (f"{glyph} ", style),
            (summary, palette.MUTED_STYLE if quiet else palette.TEXT_STYLE),
        ]
        return merge(cut(spans, width))
