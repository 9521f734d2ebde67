"""Documents as sentences: the words that command line, console and events have in common.

Whoever shows them adds colours, columns and line breaks of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vtoken import wire


def counted(number: int, noun: str) -> str:
    """`1 block`, `1,024 blocks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


KINDS: dict[wire.GroupKind, str] = {
    "full": "full attention",
    "window": "windows",
    "chunked": "chunks",
    "state": "states",
}


def kinds_text(groups: Iterable[wire.CacheGroup]) -> str:
    """The kinds of `groups`, each once: `windows and states`."""
    return " and ".join(dict.fromkeys(KINDS[group.kind] for group in groups))


def group_text(group: wire.CacheGroup) -> str:
    """`windows: 320 blocks of 16 slots in 40 layers (5.2 MB)`."""
    return (
        f"{KINDS[group.kind]}: {counted(group.blocks, 'block')} of {group.block_size:,} slots in "
        f"{counted(group.layers, 'layer')} ({data_size(group.bytes)})"
    )


def data_size(num_bytes: float) -> str:
    """Bytes in decimal units: `512 B`, `1.9 MB`."""
    number = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            digits = 0 if unit == "B" or number >= 99.95 else 1
            return f"{number:.{digits}f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def clock(ts: float) -> str:
    """The local time of day of a Unix time: `14:02:11`."""
    return time.strftime("%H:%M:%S", time.localtime(ts))


def when(ts: float) -> str:
    """The time of day, with the date unless it is today."""
    then = time.localtime(ts)
    today = then[:3] == time.localtime()[:3]
    return clock(ts) if today else time.strftime("%Y-%m-%d %H:%M:%S", then)


# ---------------------------------------------------------------- changes


def change_text(changes: Mapping[str, list[Any]], arrow: str = "->") -> str:
    """Field -> [old, new] as `theta_f 0.4 -> 0.25, planner pack -> plug`."""
    return ", ".join(
        f"{name} {value_text(old)} {arrow} {value_text(new)}"
        for name, (old, new) in changes.items()
    )


def value_text(value: Any) -> str:
    """A configuration value as short text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict) and "name" in value:
        params = ", ".join(f"{k}={value_text(v)}" for k, v in value.get("params", {}).items())
        return f"{value['name']}({params})" if params else str(value["name"])
    if isinstance(value, dict):
        return ", ".join(f"{k}={value_text(v)}" for k, v in value.items())
    return str(value)


def since_text(result: wire.PatchResult) -> str:
    """`revision 3, in force from step 120 on`: since when a change that was made is in force."""
    since = "in force"
    if result.outcome != "in_force":
        since = f"in force from step {result.applied_at_step:,} on"
    return f"revision {result.revision}, {since}"


class Effect(NamedTuple):
    """One effect of a change: `evicts now`, a number, and what it is of."""

    label: str
    number: int
    rest: str
    is_loss: bool = False  # undo does not bring it back

    def __str__(self) -> str:
        return f"{self.label} {self.number:,}{self.rest}"


def effects(found: wire.WhatIf, *, lossy: bool = False) -> list[Effect]:
    """What a change would do now. `lossy`: it changes what is evicted."""
    later = f", {found.waiting_tokens:,} more once scored" if found.waiting_tokens else ""
    is_loss = lossy and bool(found.evicted_tokens or found.waiting_tokens)
    lost = ", which cannot come back" if is_loss else ""
    moved = f" tokens ({data_size(found.moved_bytes)})"
    if found.source_blocks:
        moved += (
            f" out of {counted(found.source_blocks, 'block')} "
            f"into {found.destination_blocks:,} fresh"
        )
    listed = [
        Effect("evicts now", found.evicted_tokens, f" tokens{later}{lost}", is_loss),
        Effect("moves now", found.moved_tokens, moved),
        Effect("frees now", found.freed_blocks, " blocks"),
    ]
    if found.givable_blocks or found.short_blocks:
        short = f"; {counted(found.short_blocks, 'block')} short" if found.short_blocks else ""
        given = f" tokens in {counted(found.givable_blocks, 'block')}{short}"
        listed.append(Effect("can give", found.givable_tokens, given))
    if found.more_requests is not None:
        listed.append(
            Effect("room for", found.more_requests, " more requests like the running ones")
        )
    return listed


# ---------------------------------------------------------------- compactions


def operation_text(operation: wire.Operation) -> str:
    """The outcome of a compaction, or the plan of a dry run."""
    scope = f"request {operation.request_id}" if operation.request_id else "all requests"
    plan, result = operation.plan, operation.result
    deferred = f"; deferred: {plan.deferred_reason}" if plan and plan.deferred_reason else ""
    if operation.dry_run and plan is not None:
        return (
            f"Dry run over {scope}: would move {counted(plan.moved_tokens, 'token')} "
            f"({data_size(plan.moved_bytes)}) of {counted(plan.requests, 'request')} out of "
            f"{counted(plan.source_blocks, 'block')} and free {plan.freed_blocks:,}{deferred}."
        )
    if operation.state == "done" and result is not None:
        return (
            f"Compacted {scope}: moved {counted(result.moved_tokens, 'token')} "
            f"({data_size(result.moved_bytes)}), freed {counted(result.freed_blocks, 'block')} "
            f"in {result.duration_ms:.1f} ms{deferred}."
        )
    reason = operation.error or (plan.deferred_reason if plan else None)
    text = f"Compaction {operation.id} over {scope} is {operation.state}"
    return f"{text}: {reason}" if reason else f"{text}."


# ---------------------------------------------------------------- parts of a status


def prices_text(prices: wire.RoundPrices) -> str:
    """The prices with their sources, and what a round would save and cost now."""
    found = ", ".join(
        f"{name} {price.us:,.2f} µs a {price.per} ({_source(price)})"
        for name, price in (("hole", prices.hole), ("copy", prices.copy), ("plan", prices.plan))
    )
    if not prices.hole.us:
        return f"{found}; holes cost nothing here"
    saving, cost = prices.saving_us, prices.cost_us
    return f"{found}; a round now would save {saving:,.0f} µs and cost {cost:,.0f} µs"


def _source(price: wire.Price) -> str:
    return f"{price.samples:,} samples" if price.source == "measured" else "prior"


def calibration_text(found: wire.Calibration) -> str:
    """The layers and heads of the policy's signal, and the profile or why there is none."""
    if found.fingerprint:
        date = "" if found.created_ts is None else f", of {when(found.created_ts)}"
        profile = f"profile {found.fingerprint[:12]}{date} ({found.file})"
    else:
        profile = f"no profile: {found.detail}"
    if found.signal is None:
        return f"the policy reads no signal; {profile}"
    layers, heads = ", ".join(map(str, found.layers)), ", ".join(map(str, found.heads))
    where = f"layer{'s' * (len(found.layers) > 1)} {layers}"
    if heads:
        where += f", head{'s' * (len(found.heads) > 1)} {heads}"
    return f"{found.signal} from {where} ({found.source}); {profile}"


# ---------------------------------------------------------------- several engines

MANY_WAITING = 8  # fewer on one engine are no imbalance
IMBALANCE = 3.0  # times the mean of the others


def fleet_sentence(rows: Sequence[wire.EngineRow]) -> str:
    """What is wrong with several engines as a whole, the worst first; else that they agree."""
    return (
        _silent(rows)
        or _drifted(rows)
        or _unbalanced(rows)
        or f"{counted(len(rows), 'engine')}, all answer and run the same configuration"
    )


def _silent(rows: Sequence[wire.EngineRow]) -> str:
    silent = [row for row in rows if row.problem]
    if not silent:
        return ""
    names = _names(silent)
    verb = "does" if len(silent) == 1 else "do"
    return f"{names} {verb} not answer, the newest state is {silent[0].silent_s:,.0f} s old"


def _drifted(rows: Sequence[wire.EngineRow]) -> str:
    drifted = [row for row in rows if row.drift]
    if not drifted:
        return ""
    others = {row.revision for row in rows if not row.drift}
    what = change_text(drifted[0].drift, arrow="where the others have")
    if len(drifted) == 1 and len(others) == 1 and drifted[0].revision not in others:
        revision = f"revision {drifted[0].revision}, all others {others.pop()}"
        return f"{_names(drifted)} runs {revision}: {what}"
    verb = "differs" if len(drifted) == 1 else "differ"
    return f"{_names(drifted)} {verb} from the others: {what}"


def _unbalanced(rows: Sequence[wire.EngineRow]) -> str:
    waiting = {row.engine: row.status.requests.waiting for row in rows if row.status is not None}
    if len(waiting) < 2:
        return ""
    most = max(waiting, key=lambda engine: waiting[engine])
    others = [number for engine, number in waiting.items() if engine != most]
    mean = sum(others) / len(others)
    if waiting[most] < MANY_WAITING or waiting[most] < IMBALANCE * mean:
        return ""
    if mean < 1:
        return f"engine {most} has {waiting[most]:,} waiting requests, the others none or few"
    times = waiting[most] / mean
    return f"engine {most} holds {times:.0f} times the waiting requests of the others"


def _names(rows: Sequence[wire.EngineRow]) -> str:
    numbers = ", ".join(str(row.engine) for row in rows)
    return f"engine{'s' * (len(rows) != 1)} {numbers}"
