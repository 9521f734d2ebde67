"""SnapKV: attention of the last window's queries, pooled over neighbours (arXiv 2404.14469).

The paper's form: `window` 64, `pool_radius` 2.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vtoken.policies.base import (
    Heads,
    Layers,
    LowestScores,
    Params,
    Pool,
    PoolRadius,
    Sinks,
    register,
)
from vtoken.policies.signals import Aggregate, Signal


class SnapKVParams(Params, frozen=True):
    window: Annotated[
        int, Meta(ge=1, le=512, description="newest queries to score by; their tokens are kept")
    ] = 16
    pool_radius: PoolRadius = 3
    sinks: Sinks = 0
    heads: Heads = "mean"
    layers: Layers = "mean"
    queries: Annotated[Aggregate, Meta(description="over the window's queries")] = "mean"
    pool: Pool = "mean"


@register
class SnapKV(LowestScores):
    name = "snapkv"
    summary = "keep the last window and what it attends to, with neighbours"
    source = "arXiv 2404.14469"
    Params = SnapKVParams

    def signal(self) -> Signal:
        p = self.params
        kind = "attention_max" if p.queries == "max" else "attention_window"
        return Signal(kind, p.window, p.heads, p.layers, p.pool, p.pool_radius)

    @property
    def recent(self) -> int:
        return int(self.params.window)
