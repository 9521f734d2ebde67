"""What would relieve a memory that is short: changes of the configuration, each with what the
planner finds under it, and the memory that the requests lack.

Reads the runtime and changes nothing. The words are left to whoever shows them
(`vtoken.sentences.advice`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

from vtoken.control.outlook import Outlook
from vtoken.core.config.values import AUTO_PATCH, VTokenConfig
from vtoken.core.planning.gates import Pressure
from vtoken.core.runtime.relocation.round_planner import Preview
from vtoken.wire import MAX_TOKENS, Gate, Relief, Remedy

STEP = 2 / 3  # of a floor to the next lower one
STEPS = 2
MORE = 4  # times what a request gives for a token that it has left
HELD = ("patience", "resume")  # what can be given is not, until a setting changes


def relief(outlook: Outlook, compactions: Sequence[Remedy], block_bytes: int) -> Relief:
    """What would relieve the memory of this moment. `compactions`: remedies that free blocks;
    `block_bytes`: of a block on one rank, 0 if not known.
    """
    found = [_best(outlook, changes) for changes in _ways_out(outlook)]
    missing = outlook.missing_blocks
    return Relief(
        remedies=[*(remedy for remedy in found if remedy is not None), *compactions],
        startable_requests=outlook.startable_requests,
        more_requests=outlook.more_requests(),
        missing_blocks=missing,
        memory_bytes=(outlook.total_blocks + missing) * block_bytes if missing else 0,
    )


def _ways_out(outlook: Outlook) -> Iterator[Iterator[dict[str, Any]]]:
    """The changes of each way out, the smallest first."""
    config = outlook.config
    if config.reclamation != "auto":
        yield iter([{"reclamation": "auto"}])
    elif not config.evicts:
        yield iter([AUTO_PATCH])
    else:
        if outlook.waits_for == "patience":
            yield iter([{"evict_after_wait_ms": 0}])
        yield _lower_floors(config)
        more = min(MAX_TOKENS, MORE * config.evict_per_token_left)
        yield iter([{"evict_per_token_left": more}])


def _lower_floors(config: VTokenConfig) -> Iterator[dict[str, Any]]:
    """The settings of the floor, a third lower and then another third: one alone, then both."""
    for step in range(1, STEPS + 1):
        share = STEP**step
        if not config.budget_ratio:
            yield {"budget_tokens": max(1, int(config.budget_tokens * share))}
            continue
        ratio = {"budget_ratio": round(config.budget_ratio * share, 2)}
        least = {"budget_floor_tokens": max(1, int(config.budget_floor_tokens * share))}
        yield from (ratio, least, ratio | least)


def _best(outlook: Outlook, changes: Iterator[dict[str, Any]]) -> Remedy | None:
    """The first of `changes` under which more of those that wait could start than now; without
    one, the first under which more can be given, or given at once.
    """
    best, given = None, outlook.spendable_blocks
    is_held = outlook.waits_for in HELD
    for change in changes:
        then = outlook.under(change)
        if then is None or (then.spendable_blocks <= given and not is_held):
            continue
        blocks = then.givable_blocks if then.gives else then.spendable_blocks
        remedy = Remedy(change, blocks, then.startable_requests)
        if not outlook.waiting or remedy.startable_requests > outlook.startable_requests:
            return remedy
        best, given = best or remedy, then.spendable_blocks
    return best


# ---------------------------------------------------------------- compactions


def to_start(
    config: VTokenConfig, pressure: Pressure, gates: Sequence[Gate], freed_blocks: int
) -> list[Remedy]:
    """The change that opens the closed gates of a round that would free `freed_blocks`; [] if none
    is closed, or if no setting opens them. With requests that give, a shortage opens them.
    """
    change: dict[str, Any] = {}
    for gate in gates:
        if gate.open or gate.name in ("pause", "price"):  # a round follows by itself
            continue
        if gate.name == "theta_f":
            change["theta_f"] = _below(pressure.f)
        elif gate.name == "watermark":
            change["low_watermark_blocks"] = max(0, pressure.free_blocks - pressure.wanted_blocks)
        elif gate.name != "reclamation":
            return []
    if config.reclamation != "auto":
        change["reclamation"] = "auto"
    return [Remedy(change, freed_blocks=freed_blocks)] if change else []


def _below(f: float) -> float:
    """The next number below `f` with two decimals, or with four where that would be 0."""
    for scale in (100, 10_000):
        if (below := (ceil(f * scale) - 1) / scale) > 0:
            return below
    return 0.0


def to_free(outlook: Outlook, preview: Preview) -> list[Remedy]:
    """The change under which a round frees blocks that frees none in `preview`; [] if none does."""
    config, plan = outlook.config, preview.round
    needed = preview.available_blocks + plan.missing_blocks
    changes: list[dict[str, Any]] = []
    if plan.missing_blocks and outlook.standing.free_blocks >= needed:
        changes = [{"headroom_blocks": needed}]
    elif plan.shared_skipped_blocks and config.prefix_sharing != "copy":
        changes = [{"prefix_sharing": "index"}, {"prefix_sharing": "copy"}]
    found: list[Remedy] = []
    for change in changes:
        then = outlook.under(change)
        if then is not None and (freed := then.compacted_blocks):
            found.append(Remedy(change, freed_blocks=freed))
    return [max(found, key=lambda remedy: remedy.freed_blocks)] if found else []
