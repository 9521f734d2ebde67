"""How documents look as text: aligned, with units, coloured only where it carries meaning.

Knows the wire; prints nothing itself except through `say`, which flushes line by line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vtoken import wire

_COLORS = {"ok": "32", "fragmented": "33", "full": "31", "violation": "31", "dim": "2"}


def say(line: str) -> None:
    """One line to standard output, at once."""
    print(line, flush=True)


def say_json(document: Any) -> None:
    """One document a line."""
    say(msgspec.json.encode(document).decode())


def tinted(text: str, meaning: str) -> str:
    """`text` in the colour of `meaning`, on a terminal that has colours and wants them."""
    wanted = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if not wanted or os.environ.get("TERM") == "dumb" or meaning not in _COLORS:
        return text
    return f"\x1b[{_COLORS[meaning]}m{text}\x1b[0m"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is left as it is."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def size(num_bytes: int) -> str:
    """A number of bytes in the largest unit that leaves at least one."""
    amount, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def clock(ts: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(ts))


def plain(value: Any) -> str:
    """A configuration value, as `config set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def status_lines(status: wire.Status) -> list[str]:
    """The whole status."""
    blocks, tokens, reclaim = status.blocks, status.tokens, status.reclamation
    fragmentation, requests = status.fragmentation, status.requests
    invariants = status.invariants
    rows = [
        ("model", f"{status.model}, vLLM {status.vllm_version} on {status.device}"),
        ("step", f"{status.step:,} ({status.step_ms:.1f} ms)"),
        (
            "policy",
            f"{status.policy.name}, budget {status.budget_tokens:,} "
            f"+ {status.interval_tokens:,} tokens, revision {status.config_revision}",
        ),
        ("F", f"{fragmentation.f:.3f}, theta_F {fragmentation.theta_f:.3f}"),
        (
            "blocks",
            f"{blocks.free:,} free of {blocks.total:,} ({status.block_size} slots each), "
            f"{blocks.low_utilization:,} of low utilization, {blocks.shared:,} shared",
        ),
        ("tokens", f"{tokens.live:,} live, {tokens.dead:,} dead, {tokens.evicted:,} evicted"),
        (
            "reclamation",
            f"{reclaim.state}: {reclaim.relocations:,} relocations, {reclaim.moved_tokens:,} "
            f"tokens moved ({size(reclaim.moved_bytes)}), {reclaim.reclaimed_blocks:,} blocks "
            f"reclaimed, {reclaim.recycled_slots:,} slots recycled",
        ),
        (
            "requests",
            f"{requests.running:,} running, {requests.waiting:,} waiting, "
            f"{requests.preempted:,} preempted, {requests.finished:,} finished",
        ),
        (
            "invariants",
            f"{invariants.checked:,} commits checked, "
            f"{invariants.verified_relocations:,} relocations verified by content, "
            f"{invariants.violations:,} violations{'' if invariants.strict else ' (not strict)'}",
        ),
    ]
    sentence = fragmentation.sentence or fragmentation.cause
    return [tinted(sentence, fragmentation.cause), *table(rows)]


def watch_line(status: wire.Status, tokens_per_s: float) -> str:
    """One line of `watch`; columns never change their width."""
    cause = status.fragmentation.cause
    return (
        f"{clock(status.ts)}  F {status.fragmentation.f:.3f}  {tinted(f'{cause:<10}', cause)}  "
        f"free {status.blocks.free:>7,}/{status.blocks.total:<7,}  "
        f"run {status.requests.running:>4} wait {status.requests.waiting:>4}  "
        f"{tokens_per_s:>8,.0f} tok/s  moved {status.reclamation.moved_tokens:>10,}  "
        f"reclaimed {status.reclamation.reclaimed_blocks:>8,}"
    )


def event_line(event: wire.Event) -> str:
    return f"{clock(event.ts)}  {event.seq:>6}  {tinted(event.kind, event.kind)}: {event.summary}"


def config_lines(config: wire.ConfigDocument) -> list[str]:
    """Field, effective value, and the bound with its meaning."""
    effective = msgspec.to_builtins(config.effective)
    desired = msgspec.to_builtins(config.desired)
    rows = []
    for name, value in effective.items():
        shown = plain(value)
        if desired[name] != value:
            shown += f" (wanted: {plain(desired[name])})"
        bound = config.bounds.get(name)
        rows.append((name, shown, "" if bound is None else _bound(bound)))
    return [f"revision {config.revision}", *table(rows)]


def _bound(bound: wire.Bound) -> str:
    limits = ""
    if bound.choices:
        limits = "|".join(bound.choices)
    elif bound.minimum is not None or bound.maximum is not None:
        low = "" if bound.minimum is None else f"{bound.minimum:g}"
        high = "" if bound.maximum is None else f"{bound.maximum:g}"
        limits = f"{low}..{high}"
    return f"{limits}  {bound.summary}" if limits else bound.summary


def patch_lines(result: wire.PatchResult) -> list[str]:
    """What a change did, or would do."""
    changed = [
        f"{name}: {plain(old)} -> {plain(new)}" for name, (old, new) in result.changes.items()
    ]
    if not changed:
        return [f"nothing to change, revision {result.revision}"]
    changed += result.notes
    if result.applied_at_step is not None:
        return [*changed, f"applied at step {result.applied_at_step:,}, revision {result.revision}"]
    effect = result.what_if
    if effect is None:
        return [*changed, "dry run: nothing was changed"]
    outlook = (
        f"dry run: would evict {effect.evicted_tokens:,} tokens, free {effect.freed_blocks:,} "
        f"blocks, move {effect.moved_tokens:,} tokens ({size(effect.moved_bytes)})"
    )
    if effect.deferred_reason:
        outlook += f"; deferred: {effect.deferred_reason}"
    return [*changed, outlook]


def policy_lines(policies: list[wire.PolicyInfo]) -> list[str]:
    rows = [("NAME", "NEEDS", "SOURCE", "SUMMARY")]
    for policy in policies:
        if policy.error is not None:
            rows.append(
                (policy.name, "-", "-", tinted(f"{policy.summary}: {policy.error}", "full"))
            )
            continue
        rows.append((policy.name, ",".join(policy.needs) or "-", policy.source, policy.summary))
        for name, schema in policy.params_schema.get("properties", {}).items():
            limits = {k: schema[k] for k in ("minimum", "maximum", "enum") if k in schema}
            default = f"default {plain(schema['default'])}" if "default" in schema else ""
            rows.append(
                (f"  {name}=", "", default, " ".join(f"{k} {v}" for k, v in limits.items()))
            )
    return table(rows)


def operation_lines(operation: wire.Operation) -> list[str]:
    """A compaction, planned or over."""
    plan, result = operation.plan, operation.result
    if operation.dry_run and plan is not None:
        line = (
            f"dry run: would move {plan.moved_tokens:,} tokens ({size(plan.moved_bytes)}) of "
            f"{plan.requests:,} requests and free {plan.freed_blocks:,} blocks"
        )
        return [line if plan.deferred_reason is None else f"{line}; {plan.deferred_reason}"]
    if operation.error is not None or result is None:
        return [f"{operation.state}: {operation.error or 'no result'}"]
    line = (
        f"{operation.state}: moved {result.moved_tokens:,} tokens ({size(result.moved_bytes)}), "
        f"freed {result.freed_blocks:,} blocks in {result.duration_ms:.1f} ms"
    )
    if plan is not None and plan.deferred_reason:
        line += f"; {plan.deferred_reason}"
    return [line]
