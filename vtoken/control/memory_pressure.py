"""Documents about eviction under pressure: who needs blocks, who gives, what ended requests lost.

Reads the runtime and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import asdict

from vtoken.control.outlook import Outlook
from vtoken.core.runtime.given import KEPT_SHARES, WINDOW_S
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import MemoryPressure, RequestRow


def memory_pressure(runtime: Runtime, outlook: Outlook) -> MemoryPressure | None:
    """The pressure now, `outlook`; None if no request gives, now or if one came."""
    state, givers = runtime.state, outlook.givers
    if len(givers.live) == 0 and not runtime.config.evicts_under_pressure:
        return None
    short, log = outlook.standing, state.finished
    tokens, requests = state.given.recent()
    return MemoryPressure(
        **asdict(runtime.counters.pressure),
        near=state.is_short_soon and len(givers.live) > 0,
        short_blocks=short.blocks,
        growth_blocks=short.growth_blocks,
        asked_blocks=short.asked_blocks,
        givers=int(np.count_nonzero(outlook.blocks)),
        givable_tokens=outlook.givable_tokens,
        givable_blocks=outlook.givable_blocks,
        recent_tokens=tokens,
        recent_givers=requests,
        window_s=WINDOW_S,
        spared_tokens=int(np.maximum(0, givers.live - givers.floor).sum()),
        kept_shares={
            f"{bound:g}": count for bound, count in zip(KEPT_SHARES, log.kept_shares, strict=True)
        },
        kept_share_sum=log.kept_sum,
        headroom_blocks=short.headroom_blocks,
        future_blocks=short.future_blocks,
        waits_for=outlook.waits_for,
    )


def set_givable(runtime: Runtime, rows: Sequence[RequestRow], outlook: Outlook) -> None:
    """Fill in what each of the running requests `rows` can give."""
    names = (runtime.tables.names[row] for row in outlook.rows.tolist())
    tokens = dict(zip(names, outlook.tokens.tolist(), strict=True))
    for row in rows:
        row.givable_tokens = tokens.get(row.id, 0)
