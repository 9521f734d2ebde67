"""Line three: F against theta_F, the pressure, and whether memory is the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.breakpoints import NARROW_BELOW
from vtoken_console.widgets.lines import Line, LinesWidget, Span, facts, merge, width_of

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken import wire


def bar(f: float, theta: float, columns: int, *, ascii_only: bool) -> list[Span]:
    """F as a bar over 0..1 with a mark at theta; the part above has another colour."""
    full, empty, mark = ("#", "-", "|") if ascii_only else (" ", "░", "│")
    at = min(columns - 1, round(theta * columns))
    filled = round(f * columns)
    spans: list[Span] = []
    for x in range(columns):
        if x == at:
            spans.append((mark, palette.THETA_STYLE))
        elif x < filled:
            over = x > at and f > theta
            color = palette.WARN if over else palette.BAR
            style = palette.style(color) if ascii_only else palette.style(None, color)
            spans.append((full, style))
        else:
            spans.append((empty, palette.FAINT_STYLE))
    return spans


class Gauge(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        status = view.model.status if view.model else None
        if status is None or view.series is None:
            return []
        fragmentation, blocks, requests = status.fragmentation, status.blocks, status.requests
        over = fragmentation.f > fragmentation.theta_f
        is_narrow, pressure = width < NARROW_BELOW, status.pressure
        columns = 20 if not is_narrow else 10 if pressure is None else 0  # blocks short come first
        spans: list[Span] = [
            *facts((" F ", f"{fragmentation.f:.2f} ", _warn(over))),
            *bar(fragmentation.f, fragmentation.theta_f, columns, ascii_only=view.ascii_only),
            (" θ " if not view.ascii_only else " theta ", palette.MUTED_STYLE),
            (f"{fragmentation.theta_f:.2f}", palette.THETA_STYLE),
        ]
        digits = len(units.count(blocks.total))
        reclamation = status.reclamation
        rate = units.count(view.series.newest("tokens_per_s"), 6)
        silent = view.is_link_silent or view.engine_silent_s > 0
        low = blocks.free <= fragmentation.low_watermark_blocks
        short, giving, gave = _pressure(pressure, digits, width)
        total = "" if is_narrow and pressure else f"/{units.count(blocks.total)}"
        muted = palette.MUTED_STYLE
        groups: list[list[Span]] = [
            *short,
            [*facts(("free ", units.count(blocks.free, digits), _warn(low))), (total, muted)],
            facts(
                ("run ", f"{requests.running:>3}"),
                (" wait ", f"{requests.waiting:>3}", _warn(requests.waiting)),
            ),
            *giving,
            [("–".rjust(6) if silent else rate, palette.BOLD_STYLE), (" tok/s", muted)],
            *_latency(status, width),
            *gave,
            *_canary(status),
            facts(
                ("held ", units.count(reclamation.held_blocks, digits)),
                (" bound ", units.count(reclamation.packed_bound_blocks, digits)),
                (" naive ", units.count(reclamation.blocks_without_reclaim, digits)),
            ),
            facts(("preempted ", units.count(requests.preempted, 3), _warn(requests.preempted))),
            facts(("step ", units.latency(status.step_ms or None))),
            facts(
                ("reclaimed ", units.short_count(reclamation.reclaimed_blocks)),
                (" moved ", units.short_count(reclamation.moved_tokens)),
                (" recycled ", units.short_count(reclamation.recycled_slots)),
            ),
        ]
        for group in groups:
            if width_of(spans) + 3 + width_of(group) <= width:
                spans += [("   ", muted), *group]
        return [merge(spans)]


def _warn(condition: object) -> Style:
    """The style of a value, that of a warning if the condition holds."""
    return palette.WARN_STYLE if condition else palette.BOLD_STYLE


def _pressure(
    pressure: wire.MemoryPressure | None, digits: int, width: int
) -> tuple[list[list[Span]], list[list[Span]], list[list[Span]]]:
    """How many blocks are short; what can be given for them while some are; what was given."""
    if pressure is None:
        return [], [], []
    muted, text = palette.MUTED_STYLE, palette.BOLD_STYLE
    is_short, is_wide = pressure.short_blocks > 0, width >= 180
    too_short = pressure.short_blocks > pressure.givable_blocks
    alarm = palette.BAD_STYLE if too_short else palette.WARN_STYLE
    short: list[Span] = [
        ("SHORT ", alarm) if too_short else ("short ", muted),
        (units.count(pressure.short_blocks, digits), alarm if is_short else muted),
    ]
    if is_wide:
        short += facts(
            (" growth ", units.count(pressure.growth_blocks, digits)),
            (" asked ", units.count(pressure.asked_blocks, digits)),
        )
    can_give: list[Span] = [("none can give", alarm if is_short else muted)]
    if pressure.givers:
        givers = f"{units.count(pressure.givers)} " if is_wide else ""
        givable = units.count(pressure.givable_blocks, digits)
        can_give = [(givers, text), *facts(("can give ", givable))]
    gave: list[Span] = [
        (units.count(pressure.recent_givers), text),
        *facts((" gave ", units.short_count(pressure.recent_tokens))),
        (f" in {pressure.window_s:g} s", muted),
    ]
    more = [gave] if pressure.recent_tokens else []
    return ([short], [can_give], more) if is_short else ([short], [], [*more, can_give])


def _latency(status: wire.Status, width: int) -> list[list[Span]]:
    """Inter-token latency and time to first token: p95, on a wide line p50, p95 and p99."""
    if status.latency is None:
        return []
    wide = width >= 180
    groups: list[list[Span]] = []
    for label, one in (("ITL", status.latency.inter_token), ("TTFT", status.latency.ttft)):
        values = (one.p50_ms, one.p95_ms, one.p99_ms) if wide else (one.p95_ms,)
        names = "p50/95/99" if wide else "p95"
        groups.append(facts((f"{label} {names} ", " ".join(map(units.latency, values)))))
    return groups


def _canary(status: wire.Status) -> list[list[Span]]:
    """The quality canary's results for requests that evicted; nothing while it is off."""
    found = status.canary
    if found is None:
        return []
    agreement, lost = units.percent(found.agreement), units.nats(found.logprob_lost)
    return [facts(("agree ", agreement), (" lost ", lost))]
