"""R-KV: attention of the last queries, less how redundant a token's key is (arXiv 2505.24133).

Made for long reasoning, which repeats itself. The paper has `mix_lambda` 0.1, its code 0.07. Both
take the maximum over neighbours, `pool` "max"; their mean is the default here. Each report costs
O(n^2) in the n live tokens: see `vtoken.policies.signals.redundancy`.
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
from vtoken.policies.signals import Signal


class RKVParams(Params, frozen=True):
    window: Annotated[
        int, Meta(ge=1, le=512, description="newest queries that are asked; their tokens stay")
    ] = 8
    mix_lambda: Annotated[
        float, Meta(ge=0, le=1, description="weight of attention; the rest is redundancy's")
    ] = 0.1
    pool_radius: PoolRadius = 3
    sinks: Sinks = 0
    heads: Heads = "mean"
    layers: Layers = "mean"
    pool: Pool = "mean"


@register
class RKV(LowestScores):
    name = "r_kv"
    summary = "keep what the last window of queries attends to and what other keys do not repeat"
    source = "arXiv 2505.24133"
    Params = RKVParams

    def signal(self) -> Signal:
        p = self.params
        return Signal(
            "attention_window",
            p.window,
            p.heads,
            p.layers,
            p.pool,
            p.pool_radius,
            mix_lambda=p.mix_lambda,
        )

    @property
    def recent(self) -> int:
        return int(self.params.window)
