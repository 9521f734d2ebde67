"""Line one: the server, its policy and revision, and what is unusual about the picture."""

from __future__ import annotations

from urllib.parse import urlsplit

from vtoken.sentences import budget_text, clock, span
from vtoken_console.feed.connection import State
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, LinesWidget, Span, spread, width_of

CONNECTION_STYLES = {
    State.IDLE: ("○", "starting", palette.MUTED_STYLE),
    State.CONNECTING: ("○", "connecting", palette.WARN_STYLE),
    State.SYNCING: ("◐", "syncing", palette.WARN_STYLE),
    State.LIVE: ("●", "live", palette.GOOD_STYLE),
    State.LOST: ("×", "lost", palette.BAD_STYLE),
    State.REFUSED: ("×", "refused", palette.BAD_STYLE),
    State.CLOSED: ("○", "closed", palette.MUTED_STYLE),
}
SILENT = ("×", "silent", palette.BAD_STYLE)  # connected, but no messages or no steps
STALE_S = 2.0


def reclaiming_text(view: View) -> str:
    """`reclaiming`, or who paused it: `paused by root`."""
    assert view.model is not None
    status = view.model.status
    if status is None or status.reclamation.state == "auto":
        return "reclaiming"
    by = f" by {_person(status.reclamation.by)}" if status.reclamation.by else ""
    return f"{'paused' if status.reclamation.state == 'paused' else 'off'}{by}"


def _person(actor: str) -> str:
    """`root` of root@127.0.0.1."""
    return actor.partition("@")[0]


def _revision(view: View) -> list[str]:
    """The revision with who made it and when, and alone."""
    assert view.model is not None
    config = view.model.config
    if config is None:
        return []
    alone = f"rev {config.revision}"
    if config.made is None:
        return [alone]
    ago = span(max(0.0, view.server_now - config.made.ts))
    return [f"{alone}, {_person(config.made.actor)} {ago} ago", alone]


def failing_parts(view: View) -> list[str]:
    """Names of the failing parts of a live server: recorder, audit, …"""
    status = view.model.status if view.model is not None and view.replay is None else None
    return [part.name for part in status.health if not part.ok] if status is not None else []


class Header(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        muted, text = palette.MUTED_STYLE, palette.TEXT_STYLE
        glyph, word, style = CONNECTION_STYLES[view.connection.state]
        if view.is_link_silent or view.engine_silent_s:
            glyph, word, style = SILENT
        reconnecting = view.connection.state is State.CONNECTING and view.connection.ever_live
        if reconnecting:
            word = "reconnecting"
        right: list[Span] = []
        if failing := failing_parts(view):
            badge = f" {' + '.join(failing)} FAILS "
            right += [(badge, palette.style("#000000", palette.BAD)), (" ", text)]
        if view.read_only_reason:
            badge = " read-only " if view.replay is None else " recording "
            right.append((badge, palette.style("#000000", palette.WARN)))
            right.append((" ", text))
        if view.frozen_ts:
            badge = f" frozen at {clock(view.frozen_ts)} "
            right += [(badge, palette.style("#000000", palette.THETA)), (" ", text)]
        model = view.model
        status = model.status if model is not None else None
        if status is not None and status.reclamation.state != "auto":
            badge = f" {reclaiming_text(view)} "
            right += [(badge, palette.style("#000000", palette.WARN)), (" ", text)]
        if view.replay is None:
            right.append((f"{glyph} {word} ", style))
            if view.age_s > STALE_S and model is not None:
                right.append((f"data {units.duration(view.age_s)} old ", palette.WARN_STYLE))
        left: list[Span] = [(" vToken ", palette.BOLD_STYLE)]
        parts: list[list[list[Span]]] = []  # alternatives of each part, the longest first
        where = view.server_name or urlsplit(view.url).netloc or view.url
        if model is None or status is None:
            parts.append([[(where, text)]])
        else:
            parts.append([[(status.model.rsplit("/", 1)[-1], text), (f" @ {where}", muted)]])
            if model.hello is not None and len(model.hello.engines) > 1:
                rank = f"engine {model.hello.engine}"
                parts.append([[(rank, text), (f" of {len(model.hello.engines)}", muted)]])
            if view.fleet is not None and view.fleet.num_silent:
                parts.append([[(f"× {view.fleet.num_silent} silent", palette.BAD_STYLE)]])
            if status.policy.name == "none":
                parts.append([[("no eviction", text)]])
            else:
                name, budget = (status.policy.name, text), budget_text(status)
                texts = (budget, budget.partition(",")[0])
                parts.append([*([name, (f", {kept}", muted)] for kept in texts), [name]])
            if status.reclamation.state == "auto":
                parts.append([[(reclaiming_text(view), muted)]])
            parts.append([[(f"[{revision}]", muted)] for revision in _revision(view)])
        for forms in parts:
            room = width - width_of(left) - 3 - width_of(right)
            left += next(([("  ", text), *form] for form in forms if width_of(form) <= room), [])
        return [spread(left, right, width, text)]
