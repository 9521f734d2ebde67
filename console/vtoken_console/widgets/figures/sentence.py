"""The sentence below the header, with what would help; or why the data is not current."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken.sentences import clock
from vtoken.sentences.situation import situation
from vtoken_console.feed.connection import Connection, State
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import (
    Line,
    LinesWidget,
    Span,
    cut,
    merge,
    spread,
    width_of,
    wrap,
)

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
        """The sentence, wrapped, and the first advice with its key."""
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
        remedy = _remedy(view, status, width)
        lines = wrap(sentence, width, height)
        if not remedy:
            return lines
        room = width - width_of(remedy) - 1  # beside it, as the header ends before the edge
        if len(lines) == height and width_of(lines[-1]) > room:
            brief = situation(status, width - 1)  # a line is the remedy's
            lines = [merge(cut([(f" {brief}", style)], width))]
        if width_of(lines[-1]) > room:
            return [*lines, merge(remedy)]
        beside = [*remedy, (" ", palette.TEXT_STYLE)]
        return [*lines[:-1], spread(lines[-1], beside, width, palette.TEXT_STYLE)]


def _remedy(view: View, status: wire.Status, width: int) -> list[Span]:
    """The first advice with its key; what a recording or an observer cannot do has none. Where it
    does not fit, its last figure is left out: one that is cut would be another.
    """
    if not status.advice:
        return []
    first = status.advice[0]
    spans: list[Span] = []
    key = next((key for key in view.keys if key.id == first.action), None)
    if key is not None and view.replay is None and not (key.control and view.read_only_reason):
        style = palette.CONTROL_STYLE if key.control else palette.KEY_STYLE
        spans = [(f" [{key.shown}]", style)]
    text = f" {first.text}"
    shorter = text.rpartition(", ")[0]
    if width_of(spans) + len(text) > width and ": " in shorter:
        text = shorter
    return cut([*spans, (text, palette.TEXT_STYLE)], width)


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
