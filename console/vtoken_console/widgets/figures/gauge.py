"""Line four: how full the KV cache is, who runs and waits, and how fast tokens come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.style.breakpoints import NARROW_BELOW
from vtoken_console.widgets.lines import Line, LinesWidget, Span, facts, merge, width_of

if TYPE_CHECKING:
    from rich.style import Style

    from vtoken import wire


def bar(share: float, columns: int, *, ascii_only: bool) -> list[Span]:
    """`share`, 0..1, as a bar."""
    full, empty = ("#", "-") if ascii_only else (" ", "░")
    filled = round(share * columns)
    color = palette.style(palette.BAR) if ascii_only else palette.style(None, palette.BAR)
    return [(full * filled, color), (empty * (columns - filled), palette.FAINT_STYLE)]


def used_share(blocks: wire.BlockCounts) -> float:
    """Of all blocks; what only the prefix cache holds is free."""
    return 1 - blocks.free / max(1, blocks.total)


class Gauge(LinesWidget):
    def build_lines(self, view: View, width: int, height: int) -> list[Line]:
        status = view.model.status if view.model else None
        if status is None or view.series is None:
            return []
        blocks, requests, pressure = status.blocks, status.requests, status.pressure
        used, muted = used_share(blocks), palette.MUTED_STYLE
        columns = 10 if width < NARROW_BELOW else 24
        digits = len(units.count(blocks.total))
        rate = units.count(view.series.newest("tokens_per_s"), 5)
        silent = view.is_link_silent or view.engine_silent_s > 0
        low = blocks.free <= status.fragmentation.low_watermark_blocks and requests.waiting
        spans: list[Span] = [
            *facts((" KV ", f"{used:4.0%} ")),
            *bar(used, columns, ascii_only=view.ascii_only),
        ]
        free = units.count(blocks.free, digits)
        groups: list[list[Span]] = [
            [(free, _warn(low)), (f" of {units.count(blocks.total)} free", muted)],
            facts(
                ("running ", f"{requests.running:>2}"),
                ("  waiting ", f"{requests.waiting:>2}", _warn(requests.waiting)),
            ),
            *_missing(pressure),
            [("–".rjust(5) if silent else rate, palette.BOLD_STYLE), (" tok/s", muted)],
            *_latency(status),
            *_canary(status),
        ]
        if requests.preempted:
            groups.append(facts(("preempted ", units.count(requests.preempted))))
        for group in groups:
            if width_of(spans) + 3 + width_of(group) <= width:
                spans += [("   ", muted), *group]
        return [merge(spans)]


def _warn(condition: object) -> Style:
    """The style of a value, that of a warning if the condition holds."""
    return palette.WARN_STYLE if condition else palette.BOLD_STYLE


def _missing(pressure: wire.MemoryPressure | None) -> list[list[Span]]:
    """How many blocks are missing; red if they cannot be given."""
    if pressure is None or not pressure.short_blocks:
        return []
    too_many = pressure.short_blocks > pressure.givable_blocks
    style = palette.BAD_STYLE if too_many else palette.WARN_STYLE
    return [facts(("missing ", units.count(pressure.short_blocks), style))]


def _latency(status: wire.Status) -> list[list[Span]]:
    """The 95th percentiles of the time between tokens and of the time to the first."""
    if status.latency is None:
        return []
    values = (
        ("between tokens p95 ", status.latency.inter_token.p95_ms),
        ("first p95 ", status.latency.ttft.p95_ms),
    )
    return [facts((label, units.latency(value, 0))) for label, value in values]


def _canary(status: wire.Status) -> list[list[Span]]:
    """The quality canary's results for requests that evicted; nothing while it is off."""
    found = status.canary
    if found is None:
        return []
    agreement, lost = units.percent(found.agreement), units.nats(found.logprob_lost)
    return [facts(("agree ", agreement), (" lost ", lost))]
