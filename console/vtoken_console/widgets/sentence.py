"""Line two: one sentence in plain words, the planner's own, or why there is none."""

from __future__ import annotations

from vtoken_console import palette, units
from vtoken_console.connection import Connection, State
from vtoken_console.view import View
from vtoken_console.widgets.lines import Line, LinesWidget, Span, cut, merge, spread, width_of
from vtoken_console.widgets.sections import closed_gates


def waiting_text(connection: Connection, now: float) -> str:
    """What the link waits for: the try under way, or when the next one comes."""
    if connection.next_try is not None:
        wait = max(0.0, connection.next_try - now)
        return f"next try in {wait:3.1f} s" if wait < 10 else f"next try in {wait:.0f} s"
    return {
        State.CONNECTING: "trying now",
        State.SYNCING: "connected, waiting for the snapshot",
    }.get(connection.state, "")


class Sentence(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        connection = view.connection
        if not connection.is_live:
            if not connection.ever_live:
                return [(((" " + "no data yet"), palette.MUTED_STYLE),)]
            spans: list[Span] = [
                (
                    f" Not connected for {units.duration(view.now - connection.since)}: ",
                    palette.BAD_STYLE,
                ),
                (connection.error, palette.TEXT_STYLE),
                (f"; {waiting_text(connection, view.now)}.", palette.TEXT_STYLE),
                (
                    f" What you see is the state at {units.clock(connection.since)}.",
                    palette.MUTED_STYLE,
                ),
            ]
            return [merge(cut(spans, width))]
        status = view.model.status if view.model else None
        if status is None:
            return []
        fragmentation = status.fragmentation
        look = {
            "ok": palette.TEXT_STYLE,
            "fragmented": palette.WARN_STYLE,
            "full": palette.BAD_STYLE,
        }[fragmentation.cause]
        sentence: list[Span] = [(" " + fragmentation.sentence, look)]
        if status.invariants.violations:
            text = f" {status.invariants.violations} INVARIANT VIOLATIONS, see the log "
            alarm: list[Span] = [(text, palette.style("#000000", palette.BAD, bold=True))]
            return [spread(sentence, alarm, width, palette.TEXT_STYLE)]
        key: list[Span] = []
        if fragmentation.reclaimable_blocks and not view.read_only_reason:
            key = [
                (f" [{view.key('compact')}]", palette.KEY_STYLE),
                (" compact ", palette.MUTED_STYLE),
            ]
        closed = closed_gates(fragmentation.gates)
        waits: list[Span] = []
        if closed and fragmentation.cause != "ok":
            names = ", ".join(closed)
            waits = [("  a round waits for ", palette.MUTED_STYLE), (names, palette.WARN_STYLE)]
        # The key bar names the key as well, and the figures every gate.
        for right in ([*waits, ("  ", palette.MUTED_STYLE), *key], waits, key):
            if width_of(sentence) + width_of(right) <= width:
                return [spread(sentence, right, width, palette.TEXT_STYLE)]
        return [merge(cut(sentence, width))]
