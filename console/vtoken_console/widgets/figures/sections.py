"""The sections of the panel of numbers: moves, compaction, memory, latency, quality, own cost.

A section is a title line and rows of at most COLUMN columns. A value that the server does not
report is a dash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style

from vtoken.base.quantities import time_text
from vtoken.sentences import MANY_WASTED_MOVES, accepted_before, counted
from vtoken_console.frame.view import View
from vtoken_console.style import palette, units
from vtoken_console.widgets.lines import Line, Span, cut, merge

if TYPE_CHECKING:
    from vtoken import wire

COLUMN = 38
LABEL = 15
PARKED: dict[wire.ParkWait, str] = {  # why tokens do not come back now
    "": "tokens",
    "memory": "need memory",
    "time": "back soon",
    "resume": "until resumed",
    "budget": "over budget",
}


def _title(text: str, remark: str = "", style: Style = palette.MUTED_STYLE) -> Line:
    return merge(cut([(text, palette.BOLD_STYLE), (f"  {remark}", style)], COLUMN))


def _row(label: str, value: str, remark: str = "", style: Style = palette.TEXT_STYLE) -> Line:
    spans: list[Span] = [
        (units.fit(label, LABEL), palette.MUTED_STYLE),
        (value, style),
        (f" {remark}" if remark else "", palette.MUTED_STYLE),
    ]
    return merge(cut(spans, COLUMN))


def gate_lines(gates: list[wire.Gate], width: int = COLUMN) -> list[Line]:
    """A line per gate: open or closed, both numbers, and the name if all names fit.

    A closed gate is no fault: most of the time there is nothing to compact.
    """
    lines: list[Line] = []
    name_width = max((len(gate.name) for gate in gates), default=0) + 1
    if any(2 + name_width + len(gate.detail) > width for gate in gates):
        name_width = 0  # the details name what they compare
    for gate in gates:
        glyph, style = ("✓", palette.GOOD_STYLE) if gate.open else ("·", palette.TEXT_STYLE)
        spans: list[Span] = [
            (f"{glyph} ", style),
            (units.fit(gate.name, name_width), palette.TEXT_STYLE),
            (gate.detail, palette.MUTED_STYLE if gate.open else palette.TEXT_STYLE),
        ]
        lines.append(merge(cut(spans, width)))
    return lines


def gates_section(status: wire.Status, width: int = COLUMN) -> list[Line]:
    """The holes, and what an automatic compaction waits for."""
    found = status.fragmentation
    lines = [
        _title("compaction", f"holes {found.f:.0%}, compacts at {found.theta_f:.0%}"),
        *gate_lines(found.gates, width),
    ]
    return lines if found.gates else [*lines, _row("waits for", "–", "not reported")]


def relocation_section(view: View, status: wire.Status) -> list[Line]:
    """What compactions moved, gained and wasted, and what packing could still gain; cumulative."""
    done = status.reclamation
    megabytes = done.moved_bytes / 1e6
    rate = f"{done.relocation_freed_blocks / megabytes:8.1f}" if megabytes else "–".rjust(8)
    wasted = done.moved_then_evicted_tokens
    share = wasted / done.moved_tokens if done.moved_tokens else None
    many = share is not None and share > MANY_WASTED_MOVES
    wasted_style = palette.WARN_STYLE if many else palette.TEXT_STYLE
    known = bool(done.payback_steps)
    series = view.series
    copy = series.newest("copy_ratio") if series is not None else 0.0
    plan = series.newest("plan_ratio") if series is not None else 0.0
    lines = [
        _title("moves", "since the server started"),
        _row("held", units.count(done.held_blocks, 8), "blocks"),
        _row("could be", units.count(done.packed_bound_blocks, 8), "blocks"),
        _row("without vToken", units.count(done.blocks_without_reclaim, 8), "blocks"),
        _row("freed by moves", units.count(done.relocation_freed_blocks, 8), "blocks"),
        _row(
            "moved", units.data_size(done.moved_bytes, 8), f"{units.count(done.moved_tokens)} tok"
        ),
        _row("freed per MB", rate, "blocks/MB"),
        _row(
            "wasted moves",
            units.percent(share if known else None, 8),
            f"in {done.payback_steps} steps" if known else "",
            wasted_style,
        ),
        _row("recycled", units.count(done.recycled_slots, 8), "slots"),
        _row("time in copies", units.percent(copy, 8), f"plans {units.percent(plan, 0)}"),
    ]
    reasons = sorted((item for item in done.deferrals.items() if item[1]), key=lambda i: -i[1])
    if reasons:
        lines.append(_row("waited for", ""))
        lines += [_row(name, units.count(steps, 8), "steps") for name, steps in reasons]
    elif done.deferred:
        lines.append(_row("no reserve", units.count(done.deferred, 8), "compactions"))
    return lines


def pressure_section(status: wire.Status) -> list[Line]:
    """Who needs blocks, and what requests give for them; empty if none gives under pressure."""
    pressure = status.pressure
    if pressure is None:
        return []
    ended = sum(pressure.kept_shares.values())
    remark, style = "no block is missing", palette.MUTED_STYLE
    if pressure.short_blocks:
        missing = counted(pressure.short_blocks, "block")
        remark, style = f"{missing} missing", palette.WARN_STYLE
    lines = [
        _title("memory", remark, style),
        _row("for running", units.count(pressure.growth_blocks, 8), "blocks next"),
        _row("for waiting", units.count(pressure.asked_blocks, 8), "blocks"),
        _row("reserve", units.count(pressure.headroom_blocks, 8), "blocks"),
        _row("can give", units.count(pressure.givable_blocks, 8), f"blocks of {pressure.givers}"),
        _row("gave up", units.count(pressure.given_tokens, 8), "tokens so far"),
        *_parking_rows(status.parking),
        _row("kept, as free", units.count(pressure.spared_tokens, 8), "tokens"),
        _row(
            "kept at the end",
            units.percent(pressure.kept_share_sum / ended if ended else None, 8),
            f"of {units.count(ended)} ended",
        ),
    ]
    if early := pressure.preemptions_above_floor:  # somebody could have given
        lines.append(_row("preempted", units.count(early, 8), "too early", palette.BAD_STYLE))
    return lines


def _parking_rows(parking: wire.Parking | None) -> list[Line]:
    """What is in host memory, what came back, and what is wrong; none while it is off."""
    if parking is None:
        return []
    used = units.data_size(parking.used_bytes)
    lines = [
        _row("parked", units.count(parking.tokens, 8), PARKED[parking.waits_for]),
        _row("came back", units.count(parking.restored_tokens, 8), "tokens so far"),
        _row("host memory", used.rjust(8), f"of {units.data_size(parking.capacity_bytes)}"),
    ]
    if parking.swapped_requests:
        lines.append(_row("swapped", units.count(parking.swapped_requests, 8), "preempted ones"))
    if parking.thrashed_tokens:
        lines.append(_row("gave twice", units.count(parking.thrashed_tokens, 8), "within 5 s"))
    if parking.dropped_tokens:
        lines.append(_row("copies dropped", units.count(parking.dropped_tokens, 8), "tokens lost"))
    return lines


def price_section(status: wire.Status) -> list[Line]:
    """What holes, copies and probes cost on this machine, and what scores are computed from."""
    prices, found = status.prices, status.calibration
    if prices is None:
        return []
    lines = [_title("prices", "as measured here")]
    for name in ("hole", "copy", "park", "restore", "plan", "probe"):
        price: wire.Price | None = getattr(prices, name)
        parks = name in ("park", "restore")
        if price is not None and not (parks and price.source == "prior"):
            text = "–" if price.source == "prior" else time_text(price.us / 1e3)
            lines.append(_row(name, text.rjust(8), f"a {price.per}"))
    if found is not None and found.signal is not None:
        layers = ", ".join(map(str, found.layers))
        lines.append(_row("scores", found.signal, f"of layer {layers}"))
    return lines


def shadow_section(status: wire.Status) -> list[Line]:
    shadow = status.shadow
    if shadow is None:
        return []
    share = shadow.agreed / shadow.victims if shadow.victims else None
    lines = [
        _title("shadow policy", shadow.policy.name, palette.TEXT_STYLE),
        _row("agrees on", units.percent(share, 8), "of the victims"),
        _row("differs on", units.count(shadow.victims - shadow.agreed, 8), "tokens"),
        _row("compared", units.count(shadow.compared, 8), "evictions"),
        _row("no scores yet", units.count(shadow.waiting, 8), "evictions"),
    ]
    if shadow.error:
        lines.append(_row("failed", shadow.error, style=palette.BAD_STYLE))
    return lines


def canary_section(status: wire.Status) -> list[Line]:
    """Quality on live traffic: evicting requests and the control group; empty while off."""
    found = status.canary
    if found is None:
        return []
    head = f"{'':<{LABEL}}{'evicting':>10}{'control':>10}"
    lines = [
        _title("quality canary", f"last {found.window} checks"),
        ((head, palette.MUTED_STYLE),),
    ]
    both = (found, found.control)
    for label, values in (
        ("agreement", [units.percent(one.agreement, 10) for one in both]),
        ("log-prob. lost", [units.nats(one.logprob_lost, 10) for one in both]),
        ("log-probability", [units.nats(one.logprob, 10) for one in both]),
        ("checked", [units.count(one.count, 10) for one in both]),
    ):
        lines.append(_row(label, "".join(values)))
    if found.dropped or found.failed:
        remark = f"failed {found.failed}" if found.failed else ""
        lines.append(_row("dropped", units.count(found.dropped, 10), remark))
    return lines


def latency_section(status: wire.Status) -> list[Line]:
    latency = status.latency
    window = f"last {latency.window_s:g} s" if latency else "not reported"
    head = f"{'':<12}{'p50':>8}{'p95':>8}{'p99':>8}"
    lines = [_title("latency", window), ((head, palette.MUTED_STYLE),)]
    for label, one in (
        ("first token", latency.ttft if latency else None),
        ("between", latency.inter_token if latency else None),
    ):
        values = (one.p50_ms, one.p95_ms, one.p99_ms) if one else (None, None, None)
        text = "".join(units.latency(value, 8) for value in values)
        lines.append(((f"{label:<12}", palette.MUTED_STYLE), (text, palette.TEXT_STYLE)))
    if latency is not None:
        counted = (
            f"{units.count(latency.ttft.count)} first, {units.count(latency.inter_token.count)}"
        )
        lines.append(_row("measured", f"{counted} others"))
    if status.drafts:
        newest, before = status.drafts[0], accepted_before(status.drafts)
        remark = f"since rev {newest.revision}" if before is None else f"before {before:.0%}"
        if newest.share is None:
            remark = f"{newest.accepted_tokens} of {newest.proposed_tokens}"
        lines.append(_row("drafts accepted", units.percent(newest.share, 8), remark))
    return lines


def cost_section(view: View) -> list[Line]:
    cost = view.cost
    drawn = f"{units.short_count(cost.drawn).strip()} drawn"
    return [
        _title("this console", "what it costs"),
        _row("to terminal", units.data_size(cost.written_per_s, 8) + "/s"),
        _row("from server", units.data_size(cost.received_per_s, 8) + "/s"),
        _row("frames", f"{cost.drawn_per_s:8.1f}", "fps"),
        _row("frames dropped", units.count(cost.dropped, 8), drawn),
        _row("CPU", units.percent(cost.cpu_ratio, 8), "of one core"),
        _row("memory", units.data_size(cost.rss_bytes, 8), "RSS"),
    ]
