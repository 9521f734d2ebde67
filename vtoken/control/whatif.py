"""Dry run: what a configuration would do now, by the code path of the real plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints
from vtoken.control.outlook import Outlook
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import Pressure, describe_gates, headroom_gate
from vtoken.core.runtime.relocation.operations import describe_round
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_tables import ONE
from vtoken.wire import WhatIf


def what_if(runtime: Runtime, config: VTokenConfig) -> WhatIf:
    """The victims that `config` would choose now, and what one planning round after that would do.

    Under `pressure` the victims are those that would be given for the shortage of this moment; the
    share of a request without scores waits for them. The round bypasses the gates like a manual
    trigger; `gates` reports whether an automatic round would run. With reclamation `off` only
    all-dead blocks count as freed. Raises RefusedError when the policy fails on a request; the
    failure has no other effect.
    """
    waiting = 0  # tokens that are evicted once the policy has the scores it needs
    victims: dict[str, Ints] = {}
    outlook = Outlook(runtime, config)
    keeps = outlook.keeping()
    for table in runtime.tables:
        rules = runtime.state.rules(table.request_id, config)
        if runtime.evictor.is_due(table, config):
            keeps[table.request_id] = rules.budget_tokens
        elif table.request_id not in keeps:
            continue
        target = keeps[table.request_id]
        chosen = runtime.policy_runner.preview(table, config, target)
        if chosen is not None:
            victims[table.request_id] = chosen
        elif not runtime.policy_runner.is_suspended(rules.policy):
            waiting += table.num_live - target
    preview = runtime.round_planner.preview_after(config, victims)
    missing = preview.round.missing_blocks
    plan = describe_round(preview.round, runtime.geometry.bytes_per_token)
    pressure = replace(
        _pressure_after(runtime, victims, preview.holders),
        short_blocks=outlook.shortage.blocks,
        ask_worth=partial(runtime.pricer.worth_after, config, victims),
    )
    gates = describe_gates(config, pressure)
    gates.append(headroom_gate(preview.available_blocks, missing, gains=plan.freed_blocks > 0))
    return WhatIf(
        freed_blocks=preview.emptied_blocks + plan.freed_blocks,
        moved_tokens=plan.moved_tokens,
        moved_bytes=plan.moved_bytes,
        evicted_tokens=sum(map(len, victims.values())),
        deferred_reason=plan.deferred_reason,
        waiting_tokens=waiting,
        source_blocks=plan.source_blocks,
        destination_blocks=plan.destination_blocks,
        gates=gates,
        short_blocks=outlook.standing.blocks,
        givable_tokens=outlook.givable_tokens,
        givable_blocks=outlook.givable_blocks,
        more_requests=outlook.more_requests(),
    )


def _pressure_after(
    runtime: Runtime, victims: Mapping[str, Ints], holders: npt.NDArray[np.uint16]
) -> Pressure:
    """The gates' input in the next step, once the tokens `victims`, by request, are dead.

    `holders` [N]: how many requests hold each block then. Blocks without a holder return to the
    pool only after the step's round is planned, so the number of free blocks is that of now.
    """
    pool, size = runtime.tables.pool, runtime.geometry.block_size
    pressure = runtime.relocator.pressure(ahead=1)
    if not victims:
        return pressure
    dying = [runtime.tables[request_id].slots_of(ids) for request_id, ids in victims.items()]
    readers = pool.readers.copy()
    np.subtract.at(readers, np.concatenate(dying), ONE)
    live = np.count_nonzero(readers.reshape(pool.num_blocks, size), axis=1)
    used = holders > 0
    num_slots = int(np.count_nonzero(used)) * size
    return replace(
        pressure,
        f=1.0 - int(live.sum()) / num_slots if num_slots else 0.0,
        last_round_empty=False,
        count_low_utilization=lambda: int(np.count_nonzero(used & (live <= size // 2))),
    )
