"""Peak attention: a token stays while one recent query looks at it, or at its neighbours."""

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
    Recent,
    Sinks,
    register,
)
from vtoken.policies.signals import Signal


class PeakAttentionParams(Params, frozen=True):
    window: Annotated[int, Meta(ge=1, le=512, description="newest queries that are asked")] = 8
    pool_radius: PoolRadius = 3
    sinks: Sinks = 4
    recent: Recent = 32
    heads: Heads = "mean"
    layers: Layers = "mean"
    pool: Pool = "mean"


@register
class PeakAttention(LowestScores):
    """A single query retrieves what an answer needs, so the maximum over queries counts: a mean
    averages it away. Neighbours decide whether a name or a number survives whole.
    """

    name = "peak_attention"
    summary = "keep the tokens near the peaks of recent queries' attention, sinks and recent ones"
    Params = PeakAttentionParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("attention_max", p.window, p.heads, p.layers, p.pool, p.pool_radius)
