"""Documents formatted as text: status, events, configuration, policies, compactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import msgspec

from vtoken import wire
from vtoken.base.quantities import time_text
from vtoken.cli.printing import Part, Table, coloured, facts, plain
from vtoken.sentences import (
    clock,
    counted,
    data_size,
    drafts_text,
    group_text,
    operation_text,
    peaks_text,
    policy_text,
    prices_text,
    sessions_text,
    signal_text,
    since_text,
    slo_text,
    when,
)
from vtoken.sentences.parking import parking_text
from vtoken.sentences.what_if import difference, notes_beside
from vtoken.wire.bounds import span
from vtoken.wire.guards import guard_text

WIDE_VALUE = 24  # a value with more columns gets its own line


def status_parts(status: wire.Status) -> list[Part]:
    """The entire status."""
    blocks, tokens, reclaim = status.blocks, status.tokens, status.reclamation
    fragmentation, requests, seen = status.fragmentation, status.requests, status.invariants
    rows = facts(
        ("model", f"{status.model}, vLLM {status.vllm_version} on {status.device}"),
        ("step", f"{status.step:,}" + (f" ({_ms(status.step_ms)})" if status.step_ms else "")),
        ("latency", _latency(status.latency) if status.latency else ""),
        ("goodput", slo_text(status.slo) if status.slo else ""),
        ("drafts", drafts_text(status.drafts) if status.drafts else ""),
        ("policy", f"{policy_text(status)}, revision {status.config_revision}"),
        ("holes", f"{fragmentation.f:.1%}, compacts at {fragmentation.theta_f:.0%} (theta_f)"),
        (
            "blocks",
            f"{blocks.free:,} free of {blocks.total:,} ({status.block_size} slots each), "
            f"{blocks.low_utilization:,} of low utilization, {blocks.shared:,} shared"
            + (f", {blocks.withheld:,} withheld by --watermark" if blocks.withheld else ""),
        ),
        *(
            (f"group {group.index}", group_text(group) + ("" if group.managed else ", not evicted"))
            for group in status.groups
        ),
        ("tokens", f"{tokens.live:,} live, {tokens.dead:,} dead, {tokens.evicted:,} evicted"),
        ("pressure", pressure_line(status.pressure) if status.pressure else ""),
        ("parking", parking_text(status.parking) if status.parking else ""),
        (
            "reclamation",
            f"{reclaim.state}: {counted(reclaim.relocations, 'relocation')}, "
            f"{counted(reclaim.moved_tokens, 'token')} moved ({data_size(reclaim.moved_bytes)}), "
            f"{counted(reclaim.reclaimed_blocks, 'block')} reclaimed, "
            f"{counted(reclaim.recycled_slots, 'slot')} recycled",
        ),
        (
            "requests",
            f"{requests.running:,} running, {_bad(requests.waiting)} waiting, "
            f"{requests.preempted:,} preempted, {requests.finished:,} finished"
            + (f", {requests.idle:,} idle" if requests.idle else "")
            + (f", paused since {when(status.paused_since_ts)}" if status.paused_since_ts else ""),
        ),
        ("24 h peaks", peaks_text(status.peaks)),
        ("sessions", sessions_text(requests.sessions, requests.session_blocks, blocks.total)),
        (
            "invariants",
            f"{seen.checked:,} commits checked, "
            f"{seen.verified_relocations:,} relocations verified by content, "
            f"{_bad(seen.violations, 'full')} violations{'' if seen.strict else ' (not strict)'}",
        ),
        ("prices", prices_text(status.prices) if status.prices else ""),
        ("signal", signal_text(status.calibration) if status.calibration else ""),
        ("shadow", _shadow(status.shadow) if status.shadow else ""),
        ("canary", canary_line(status.canary) if status.canary else ""),
        ("health", _health(status.health)),
    )
    sentence = fragmentation.sentence or fragmentation.cause
    head = [*failing_lines(status), coloured(sentence, fragmentation.cause)]
    return [*head, *advice_lines(status), rows]


def advice_lines(status: wire.Status) -> list[str]:
    """What ends a shortage, each with its command on a line of its own; doctor has the notes."""
    lines = []
    for one in status.advice:
        if one.level != "note":
            lines += [f"  {one.text}", *([f"    {one.command}"] if one.command else [])]
    return lines


def _bad(number: int, meaning: str = "fragmented") -> str:
    """A number that should be 0, coloured unless it is."""
    return coloured(f"{number:,}", meaning if number else "")


def _health(parts: Sequence[wire.Health]) -> str:
    """That all parts are well; of the others, `failing_lines` has a line each."""
    if not all(part.ok for part in parts):
        return ""
    return f"ok: {'; '.join(f'{part.name} {part.detail}' for part in parts)}" if parts else ""


def pressure_line(found: wire.MemoryPressure) -> str:
    """What is short, who gave and can give, and what still lives; the status's sentence says for
    whom it is short, and what ends that.
    """
    short = counted(found.short_blocks, "block")
    gave = (
        f"{counted(found.recent_givers, 'request')} gave "
        f"{counted(found.recent_tokens, 'token')} in the last {found.window_s:g} s"
    )
    blocks = counted(found.givable_blocks, "block")
    can_give = f"can give {blocks} ({found.givable_tokens:,} tokens)"
    above_floor = found.preemptions_above_floor
    parts = (
        coloured(f"{short} missing", "fragmented") if found.short_blocks else "",
        gave if found.recent_tokens else "",
        f"{counted(found.givers, 'request')} {can_give}" if found.givers else "no request can give",
        f"{counted(found.spared_tokens, 'token')} kept thanks to free memory",
        f"{found.given_tokens:,} given up since the start",
        f"{above_floor:,} preempted while a request could give" if above_floor else "",
    )
    return "; ".join(filter(None, parts))


def fleet_parts(fleet: wire.Fleet) -> list[Part]:
    """The engines of a server, and what is wrong with them as a whole."""
    rows = member_table("ENGINE", [(f"{row.engine}", row) for row in fleet.engines])
    return [rows, verdict(fleet.sentence, ok=fleet.ok)]


def verdict(sentence: str, *, ok: bool) -> str:
    """What is wrong with several engines as a whole, or that nothing is."""
    return sentence if ok else coloured(sentence, "fragmented")


def member_table(what: str, labelled: Iterable[tuple[str, wire.EngineRow]]) -> Table:
    """A row for each engine under its label; `what`: the column of the labels."""
    head = (what, "REVISION", "POLICY", "HOLES", "FREE", "RUNNING", "WAITING", "MEMORY", "STATE")
    rows = []
    for label, row in labelled:
        status = row.status
        state = "answers"
        if row.problem and status is None:
            state = coloured(f"FAILED: {row.problem}", "full")
        elif row.problem:
            state = coloured(f"silent for {row.silent_s:,.0f} s", "full")
        elif row.drift:
            state = coloured(f"differs in {', '.join(row.drift)}", "fragmented")
        if status is None:
            rows.append((label, "-", "-", "-", "-", "-", "-", "-", state))
            continue
        rows.append(
            (
                label,
                f"{row.revision}",
                status.policy.name,
                f"{status.fragmentation.f:.1%}",
                f"{status.blocks.free:,} of {status.blocks.total:,}",
                f"{status.requests.running:,}",
                _bad(status.requests.waiting),
                coloured(status.fragmentation.cause, status.fragmentation.cause),
                state,
            )
        )
    return Table(rows, head)


def failing_lines(status: wire.Status) -> list[str]:
    """One line for each failing part of the server."""
    failing = [part for part in status.health if not part.ok]
    return [coloured(f"FAILS: {part.name}: {part_text(part)}", "full") for part in failing]


def part_text(part: wire.Health) -> str:
    """The state of a part of the server, and since when it fails."""
    return part.detail if part.since_ts is None else f"{part.detail} (since {when(part.since_ts)})"


def _latency(latency: wire.Latency) -> str:
    first, between = latency.ttft, latency.inter_token
    return (
        f"first token p50 {_ms(first.p50_ms)}, p95 {_ms(first.p95_ms)}; between tokens p50 "
        f"{_ms(between.p50_ms)}, p95 {_ms(between.p95_ms)}, p99 {_ms(between.p99_ms)} "
        f"(last {latency.window_s:g} s)"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else time_text(value)


def _shadow(shadow: wire.Shadow) -> str:
    if shadow.error is not None:
        return f"{shadow.policy.name} failed: {shadow.error}"
    share = f"{shadow.agreed / shadow.victims:.0%}" if shadow.victims else "-"
    return (
        f"{shadow.policy.name} would have evicted {share} of the same tokens "
        f"({shadow.compared:,} evictions compared, {shadow.waiting:,} without scores)"
    )


def canary_line(canary: wire.CanaryStatus) -> str:
    """The canary's means for evicting requests and for the control group."""
    unchecked = [
        f"{number:,} {what}"
        for number, what in (
            (canary.dropped, "dropped"),
            (canary.failed, "failed"),
            (sum(canary.skipped.values()), "skipped"),
        )
        if number
    ]
    parts = [_canary_group(canary), f"control {_canary_group(canary.control)}"]
    return "; ".join([*parts, ", ".join(unchecked)] if unchecked else parts)


def _canary_group(group: wire.CanaryFigures) -> str:
    if not group.count:
        return "none checked"
    agreement = _mean(group.agreement, group.agreement_se, 100, " %")
    lost = _mean(group.logprob_lost, group.logprob_lost_se)
    return f"agreement {agreement}, log-probability lost {lost} ({group.count:,} checked)"


def _mean(mean: float | None, error: float | None, scale: float = 1, unit: str = "") -> str:
    if mean is None:
        return "-"
    return f"{mean * scale:.3g}{unit}" + ("" if error is None else f" ± {error * scale:.1g}{unit}")


def watch_line(status: wire.Status, tokens_per_s: float | None) -> str:
    """One line of `watch` in fixed columns, for 80 of them; an unknown rate is a dash."""
    cause = status.fragmentation.cause
    state = cause if status.scheduling == "running" else "paused"
    rate = "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
    return (
        f"{clock(status.ts)}  {coloured(f'{state:<10}', cause)}  "
        f"free {status.blocks.free:>5,}/{status.blocks.total:<5,}  "
        f"run {status.requests.running:>2} wait {status.requests.waiting:>2}  "
        f"{rate:>5} tok/s  holes {status.fragmentation.f:>4.0%}"
    )


def silence_line(status: wire.Status, now_ts: float) -> str:
    """The line of `watch` at `now_ts` if no step has run since `status`."""
    num_waiting = status.requests.running + status.requests.waiting
    waiting = "1 request waits" if num_waiting == 1 else f"{num_waiting:,} requests wait"
    text = f"no step for {now_ts - status.ts:,.0f} s while {waiting}"
    return f"{clock(now_ts)}  {coloured(text, 'full')}"


def event_line(event: wire.Event) -> str:
    return f"{clock(event.ts)}  {event.seq:>6}  {coloured(event.kind, event.kind)}: {event.summary}"


def config_parts(config: wire.ConfigDocument) -> list[Part]:
    """Field, effective value, and the bound with its meaning."""
    effective = msgspec.to_builtins(config.effective)
    desired = msgspec.to_builtins(config.desired)
    rows: list[tuple[str, str, str]] = []
    for name, value in effective.items():
        text = plain(value)
        if desired[name] != value:
            text += f" (set: {plain(desired[name])})"
        bound = config.bounds.get(name)
        limits = "" if bound is None else _bound(bound)
        if len(text) > WIDE_VALUE:  # keeps the bounds of other fields aligned near their values
            rows += [(name, "", text), ("", "", limits)]
        else:
            rows.append((name, text, limits))
    head: list[Part] = [
        f"revision {config.revision}{behind(config.revision, config.effective_revision)}"
    ]
    if config.trial is not None:
        head.append(trial_line(config.trial))
    return [*head, Table(rows)]


def behind(revision: int, effective_revision: int) -> str:
    """A note if the engine does not run the newest revision yet."""
    if effective_revision in (0, revision):  # 0: the server does not report it
        return ""
    return f", not in force yet: the newest step ran with revision {effective_revision}"


def trial_line(trial: wire.Trial) -> str:
    """The conditions under which a change on trial is reverted."""
    ends = []
    if trial.expires_ts is not None:
        ends.append(f"unless confirmed by {clock(trial.expires_ts)} (vtoken confirm)")
    ends += [f"if {guard_text(guard)}" for guard in trial.guards]
    return f"revision {trial.revision} is on trial: reverted {', or '.join(ends)}"


def _bound(bound: wire.Bound) -> str:
    limits = "|".join(bound.choices) if bound.choices else span(bound)
    return f"{limits}  {bound.summary}" if limits else bound.summary


def patch_lines(result: wire.PatchResult) -> list[str]:
    """The effect of a change or of a dry run."""
    lines = change_lines(result)
    if result.engines:
        ranks = ", ".join(str(part.engine) for part in result.engines)
        lines.append(f"on engines {ranks}")
    return lines


def change_lines(result: wire.PatchResult) -> list[str]:
    """What has changed and since when, or what would change and do; not on which engines."""
    changed = [
        f"{name}: {plain(old)} -> {plain(new)}" for name, (old, new) in result.changes.items()
    ]
    if not changed:  # for instance a confirmation, which has a note
        late = behind(result.revision, result.effective_revision)
        return [*result.notes, f"nothing to change, revision {result.revision}{late}"]
    if result.applied_at_step is not None:
        changed += [*result.notes, since_text(result)]
        return changed if result.trial is None else [*changed, trial_line(result.trial)]
    would = [line.text for line in difference(result, "->")]
    return [*changed, *notes_beside(result), "dry run: nothing was changed", *would]


def policy_parts(policies: list[wire.PolicyInfo], in_force: Set[str]) -> list[Part]:
    """A line for each policy, with a * before those in force."""
    rows = []
    for policy in policies:
        mark = "*" if policy.name in in_force else " "
        why = "" if policy.error is None else coloured(f": {policy.error}", "full")
        rows.append((f"{mark} {policy.name}", policy.summary + why))
    more = "parameters: vtoken policy list NAME; which to choose: docs/choose.md"
    return [Table(rows, ("  NAME", "WHAT IT DOES")), more]


def policy_detail_parts(policies: list[wire.PolicyInfo]) -> list[Part]:
    """One policy with the facts that answers contained, if measured, and its parameters."""
    (policy,) = policies
    answered = ", ".join(f"{point.found:.0%} at {point.keep:.0%}" for point in policy.facts)
    about = facts(
        (policy.name, policy.summary),
        ("cannot be loaded", coloured(policy.error, "full") if policy.error else ""),
        ("source", policy.source),
        ("reads", ", ".join(policy.needs)),
        ("facts found", f"{answered} of the prompt kept, on SmolLM2-135M" if answered else ""),
    )
    rows = []
    for name, schema in policy.params_schema.get("properties", {}).items():
        values = "|".join(schema.get("enum", [])) or schema.get("type", "")
        if "minimum" in schema:
            values = f"{schema['minimum']:g}..{schema['maximum']:g}"
        rows.append((name, plain(schema.get("default")), values, schema.get("description", "")))
    return [about, Table(rows, ("PARAMETER", "DEFAULT", "VALUES", "MEANING"))]


def operation_lines(operation: wire.Operation) -> list[str]:
    """A compaction, planned or finished."""
    return [operation_text(operation)]
