"""The sentence below the header: the planner's advice, or why the data is not current."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken.sentences import clock
from vtoken_console.feed.connection import Connection, State
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.figures.sections import closed_gates
from vtoken_console.widgets.lines import EMPTY, Line, LinesWidget, Span, spread, width_of, wrap

if TYPE_CHECKING:
    from vtoken import wire


def waiting_text(connection: Connection, now: float) -> str:
    """The state of the connection attempt, or the time until the next one."""
    if connection.next_try is not None:
        wait = max(0.0, connection.next_try - now)
        return f"next try in {wait:3.1f} s" if wait < 10 else f"next try in {wait:.0f} s"
    return {
        State.CONNECTING: "trying now",
        State.SYNCING: "connected, waiting for the snapshot",
    }.get(connection.state, "")


class Sentence(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        """The sentence, wrapped; closed gates and the key that acts on it at its end."""
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
                    f" What you see is the state at {clock(connection.since)}.",
                    palette.MUTED_STYLE,
                ),
            ]
            return wrap(spans, width, height)
        status = view.model.status if view.model else None
        if status is None:
            return []
        if spans := _silence(view):
            return wrap(spans, width, height)
        fragmentation = status.fragmentation
        style = {
            "ok": palette.TEXT_STYLE,
            "fragmented": palette.WARN_STYLE,
            "full": palette.BAD_STYLE,
        }[fragmentation.cause]
        if status.scheduling != "running":
            style = palette.WARN_STYLE
        sentence: list[Span] = [(" " + fragmentation.sentence, style)]
        if status.invariants.violations:
            text = f" {status.invariants.violations} INVARIANT VIOLATIONS, see the log "
            alarm: list[Span] = [(text, palette.style("#000000", palette.BAD, bold=True))]
            return [spread(sentence, alarm, width, palette.TEXT_STYLE)]
        key: list[Span] = []
        helps = _key_that_helps(status)
        if helps and not view.read_only_reason:
            key = [
                (f" [{view.key('pause' if helps == 'resume' else helps)}]", palette.KEY_STYLE),
                (f" {helps} ", palette.MUTED_STYLE),
            ]
        closed = closed_gates(fragmentation.gates)
        waits: list[Span] = []
        if closed and fragmentation.cause == "fragmented":
            names = ", ".join(closed)
            waits = [("  a round waits for ", palette.MUTED_STYLE), (names, palette.WARN_STYLE)]
        lines = wrap(sentence, width, height)
        end = len(lines) - 1
        lines += [EMPTY] * (height - len(lines))
        # What does not fit is dropped: the key bar has the key, the metrics panel every gate.
        for right in ([*waits, ("  ", palette.MUTED_STYLE), *key], waits, key):
            for at in (end, len(lines) - 1):
                if width_of(lines[at]) + width_of(right) <= width:
                    lines[at] = spread(lines[at], right, width, palette.TEXT_STYLE)
                    return lines
        return lines


def _key_that_helps(status: wire.Status) -> str:
    """What would end the shortage: `compact` if that frees enough, or `resume`; "" if neither."""
    fragmentation, pressure = status.fragmentation, status.pressure
    if pressure is not None and pressure.waits_for == "resume":
        return "resume"
    if pressure is None or fragmentation.cause == "fragmented":
        return "compact" if fragmentation.reclaimable_blocks else ""
    return ""


def _silence(view: View) -> list[Span]:
    """A warning that the data is stale although the connection is live, or an empty list."""
    silent_s, status = view.engine_silent_s, view.model.status if view.model else None
    if view.is_link_silent:
        text = f" No message from the server for {units.duration(view.age_s)}."
    elif silent_s and status is not None:
        waiting = status.requests.running + status.requests.waiting
        requests = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
        text = f" No step for {units.duration(silent_s)} while {requests} for it: "
        text += "one very long step, or the engine hangs."
    else:
        return []
    seen = status.ts if status is not None else view.now - view.age_s
    return [
        (text, palette.BAD_STYLE),
        (f" What you see is the state at {clock(seen)}.", palette.MUTED_STYLE),
    ]
