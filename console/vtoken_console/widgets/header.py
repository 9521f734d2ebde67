"""Line one: the server, its configuration, and the age of the data."""

from __future__ import annotations

from urllib.parse import urlsplit

from vtoken.sentences import budget_text
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
COST_FROM = 160  # columns from which the console's own cost is shown


def mode_name(view: View) -> str:
    """The variant and the state of reclamation: vtoken·auto, vtoken·paused, naive-evict."""
    assert view.model is not None
    status = view.model.status
    if status is None:
        return ""
    if status.reclamation.state == "off":
        return "naive-evict"
    return f"vtoken·{status.reclamation.state}"


def cost_spans(view: View) -> list[Span]:
    """The console's own cost: bytes to the terminal and from the server, CPU, memory, frames."""
    cost, muted = view.cost, palette.MUTED_STYLE
    spans: list[Span] = [
        (f"console tty {units.data_size(cost.written_per_s, 7)}/s", muted),
        (f" net {units.data_size(cost.received_per_s, 7)}/s", muted),
        (f" cpu {units.percent(cost.cpu_ratio, 5)}", muted),
        (f" rss {units.data_size(cost.rss_bytes, 6)}", muted),
    ]
    if cost.is_dropping:
        spans.append((f" {units.short_count(cost.dropped)} frames dropped", palette.WARN_STYLE))
    return [*spans, ("   ", muted)]


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
        if view.replay is None:
            right.append((f"{glyph} {word}", style))
        if view.model is not None and view.replay is None:
            stale = view.age_s > STALE_S
            right.append((" " + units.age(view.age_s), palette.WARN_STYLE if stale else muted))
            right.append((f" {view.fps:4.1f} fps ", muted))
            if width >= COST_FROM:
                right = [*cost_spans(view), *right]
        left: list[Span] = [(" vToken ", palette.BOLD_STYLE)]
        parts: list[list[list[Span]]] = []  # alternatives of each part, the longest first
        where = view.server_name or urlsplit(view.url).netloc or view.url
        model = view.model
        if model is None or model.status is None:
            parts.append([[(where, text)]])
        else:
            status = model.status
            parts.append([[(status.model.rsplit("/", 1)[-1], text), (f" @ {where}", muted)]])
            if model.hello is not None and len(model.hello.engines) > 1:
                rank = f"engine {model.hello.engine}"
                parts.append([[(rank, text), (f" of {len(model.hello.engines)}", muted)]])
            if view.fleet is not None and view.fleet.num_silent:
                parts.append([[(f"× {view.fleet.num_silent} silent", palette.BAD_STYLE)]])
            parts.append([[(mode_name(view), text)]])
            if status.policy.name == "none":
                parts.append([[("no eviction", text)]])
            else:
                name, budget = (status.policy.name, text), budget_text(status)
                texts = (budget, budget.partition(",")[0])
                parts.append([*([name, (f" {kept}", muted)] for kept in texts), [name]])
            parts.append([[(f"rev {status.config_revision}", muted)]])
        for forms in parts:
            room = width - width_of(left) - 3 - width_of(right)
            left += next(([("  ", text), *form] for form in forms if width_of(form) <= room), [])
        return [spread(left, right, width, text)]
