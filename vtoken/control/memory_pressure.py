"""Documents about eviction under pressure: who needs blocks, who gives, what ended requests lost.

Reads the runtime and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import asdict

from vtoken.core.runtime.due import NEVER
from vtoken.core.runtime.given import KEPT_SHARES, WINDOW_S, Finished
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.runtime.shortage import NO_SHORTAGE
from vtoken.wire import MemoryPressure, RequestDetail, RequestRow


def memory_pressure(runtime: Runtime) -> MemoryPressure | None:
    """The pressure now; None if no request gives, now or if one came."""
    state, config = runtime.state, runtime.config
    rows = state.giving_rows()
    if len(rows) == 0 and not config.gives:
        return None
    size = runtime.geometry.block_size
    givers = runtime.admission.givers(rows)
    blocks = givers.most_blocks(size)
    near = state.is_short_soon and len(rows) > 0  # else the newest shortage is an old one
    short = runtime.shortages.newest if near else NO_SHORTAGE
    tokens, requests = state.given.recent()
    limits = givers.floor + state.due.interval[rows]
    spared = np.where(givers.live > limits, givers.live - givers.floor, 0)
    log = state.finished
    return MemoryPressure(
        **asdict(runtime.counters.pressure),
        near=near,
        short_blocks=short.blocks,
        growth_blocks=short.growth_blocks,
        asked_blocks=short.asked_blocks,
        givers=int(np.count_nonzero(blocks)),
        givable_tokens=int(blocks.sum()) * size,
        givable_blocks=int(blocks.sum()),
        recent_tokens=tokens,
        recent_givers=requests,
        window_s=WINDOW_S,
        spared_tokens=int(spared.sum()),
        kept_shares={
            f"{bound:g}": count for bound, count in zip(KEPT_SHARES, log.kept_shares, strict=True)
        },
        kept_share_sum=log.kept_sum,
    )


def set_givable(runtime: Runtime, rows: Sequence[RequestRow]) -> None:
    """Fill in what each of the running requests `rows` can give."""
    tables, floor = runtime.tables, runtime.state.due.floor
    giving = [row for row in rows if row.id in tables and floor[tables[row.id].row] < NEVER]
    if not giving:
        return
    numbers = np.array([tables[row.id].row for row in giving], dtype=np.int64)
    size = runtime.geometry.block_size
    blocks = runtime.admission.givers(numbers).most_blocks(size)
    for row, count in zip(giving, blocks.tolist(), strict=True):
        row.givable_tokens = count * size


def ended_detail(ended: Finished) -> RequestDetail:
    """The document of a request that has ended."""
    detail = RequestDetail(
        id=ended.request_id,
        state="finished",
        live=ended.live_tokens,
        dead=ended.dead_tokens,
        prompt_tokens=ended.prompt_tokens,
        output_tokens=max(0, ended.num_tokens - ended.prompt_tokens),
        blocks=0,
        bound_blocks=0,
        naive_blocks=0,
        policy=ended.policy,
        budget_tokens=ended.budget_tokens,
        dense=True,
        preemptions=ended.preemptions,
        evict_when=ended.evict_when,
    )
    detail.given_tokens, detail.ended_ts = ended.given_tokens, ended.ended_ts
    detail.evict_during = ended.evict_during
    return detail
