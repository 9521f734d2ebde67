"""R-KV: attention of the last queries, less the redundancy of a token's key (arXiv 2505.24133).

Designed for long reasoning, which repeats itself. The paper's form: `window` 8, `mix_lambda` 0.1
(0.07 in its code), and the maximum over neighbours, `pool` "max", `pool_radius` 3. Each report
costs O(n^2) in the n live tokens: see `vtoken.policies.signals.redundancy`.
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
        int, Meta(ge=1, le=512, description="newest queries to score by; their tokens are kept")
    ] = 16
    mix_lambda: Annotated[
        float, Meta(ge=0, le=1, description="weight of attention; 1 minus it weights redundancy")
    ] = 0.5
    pool_radius: PoolRadius = 2
    sinks: Sinks = 0
    heads: Heads = "mean"
    layers: Layers = "mean"
    pool: Pool = "mean"


@register
class RKV(LowestScores):
    name = "r_kv"
    summary = "keep attended tokens whose keys are not redundant"
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
