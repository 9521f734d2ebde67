"""What a configuration would do right now, by the code path of the real plan; changes nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.planner import Layout, num_excess_blocks
from vtoken.reclaim import plan_round
from vtoken.runtime import Runtime
from vtoken.sharing import keeps_dead_shared_blocks
from vtoken.wire import WhatIf


def what_if(runtime: Runtime, config: VTokenConfig) -> WhatIf:
    """Victims that `config` would choose now, and what one planning round after that would do.

    The gates are passed as by a manual trigger, so that the answer says what is there to gain;
    with reclamation `off` only all-dead blocks count.
    """
    size = runtime.geometry.block_size
    evicted = 0
    dropped: Counter[int] = Counter()
    layouts: list[Layout] = []
    for table in runtime.tables:
        victims = runtime.evictor.pick_victims(table, config)
        num_victims = 0 if victims is None else len(victims)
        if num_victims == 0 and not table.virtual:
            continue
        evicted += num_victims
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
    holders = runtime.tables.pool.holders.copy()
    for block, n in dropped.items():
        holders[block] -= n
    freed = sum(int(holders[block]) == 0 for block in dropped)
    if config.reclamation == "off":
        return WhatIf(freed_blocks=freed, moved_tokens=0, moved_bytes=0, evicted_tokens=evicted)
    layouts.sort(key=lambda layout: int(np.count_nonzero(layout.grid < 0)), reverse=True)
    found = plan_round(
        layouts,
        config,
        holders=holders,
        batch_size=config.batch_size,
        headroom_blocks=runtime.relocator.headroom(config),
    )
    return WhatIf(
        freed_blocks=freed + found.num_freed_blocks,
        moved_tokens=found.num_moved_tokens,
        moved_bytes=found.num_moved_tokens * runtime.geometry.bytes_per_token,
        evicted_tokens=evicted,
        deferred_reason=(
            f"{found.missing_blocks} more headroom blocks needed" if found.missing_blocks else None
        ),
    )
