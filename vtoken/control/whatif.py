"""What a configuration would do right now, by the code path of the real plan; changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vtoken.config.values import VTokenConfig
from vtoken.planning.gates import Pressure, describe_gates, headroom_gate
from vtoken.planning.planner import Layout, num_excess_blocks
from vtoken.planning.round import Round, plan_round
from vtoken.planning.sharing import keeps_dead_shared_blocks
from vtoken.runtime.operations import describe_round
from vtoken.runtime.runtime import Runtime
from vtoken.tables.pool import ONE, Slots
from vtoken.wire import WhatIf

Counts = npt.NDArray[np.uint16]


def what_if(runtime: Runtime, config: VTokenConfig) -> WhatIf:
    """Victims that `config` would choose now, and what one planning round after that would do.

    The gates are passed as by a manual trigger, so that the answer says what is there to gain;
    `gates` says whether an automatic round would run. With reclamation `off` only all-dead blocks
    count. Raises RefusedError when the policy fails on a request: nothing is held against it.
    """
    pool = runtime.tables.pool
    size = runtime.geometry.block_size
    evicted = waiting = 0
    dying: list[Slots] = []
    dropped: Counter[int] = Counter()
    layouts: list[Layout] = []
    for table in runtime.tables:
        victims = runtime.evictor.would_evict(table, config)
        num_victims = 0 if victims is None else len(victims)
        if victims is None:
            waiting += runtime.evictor.num_waiting(table, config)
        if num_victims == 0 and not table.virtual:
            continue
        evicted += num_victims
        if victims is not None:
            dying.append(table.slots_of(victims))
        layout = runtime.relocator.layout_of(table, victims)
        stays = np.count_nonzero(layout.grid >= 0, axis=1) > 0
        if keeps_dead_shared_blocks(config):
            stays |= ~layout.movable
        dropped.update(layout.blocks[i] for i in np.flatnonzero(~stays))
        kept = Layout(
            layout.request_id,
            tuple(b for b, keep in zip(layout.blocks, stays, strict=True) if keep),
            layout.grid[stays],
            layout.movable[stays],
            layout.writable[stays],
        )
        if num_excess_blocks(len(kept.blocks), table.num_live - num_victims, size) > 0:
            layouts.append(kept)
    holders = pool.holders.copy()
    for block, n in dropped.items():
        holders[block] -= n
    freed = sum(int(holders[block]) == 0 for block in dropped)
    layouts.sort(key=lambda layout: int(np.count_nonzero(layout.grid < 0)), reverse=True)
    available = runtime.relocator.headroom(config)
    found = Round((), 0)
    if config.reclamation != "off":
        found = plan_round(
            layouts,
            config,
            holders=holders,
            batch_size=config.batch_size,
            headroom_blocks=available,
        )
    plan = describe_round(found, runtime.geometry.bytes_per_token)
    gates = describe_gates(config, _pressure_after(runtime, dying, holders))
    gates.append(headroom_gate(available, found.missing_blocks, gains=plan.freed_blocks > 0))
    return WhatIf(
        freed_blocks=freed + plan.freed_blocks,
        moved_tokens=plan.moved_tokens,
        moved_bytes=plan.moved_bytes,
        evicted_tokens=evicted,
        deferred_reason=plan.deferred_reason,
        waiting_tokens=waiting,
        source_blocks=plan.source_blocks,
        destination_blocks=plan.destination_blocks,
        gates=gates,
    )


def _pressure_after(runtime: Runtime, dying: list[Slots], holders: Counts) -> Pressure:
    """What the gates see in the next step, once the tokens in `dying` slots are dead.

    `holders` [N]: requests that hold each block then. Blocks that nobody holds go back to the pool
    only after the step's round was planned, so as many are free as now.
    """
    pool, size = runtime.tables.pool, runtime.geometry.block_size
    pressure = runtime.relocator.pressure(ahead=1)
    if not dying:
        return pressure
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
