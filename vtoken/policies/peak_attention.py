"""Peak attention: keeps a token while any recent query attends to it or to its neighbours."""

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
    window: Annotated[int, Meta(ge=1, le=512, description="newest queries to score by")] = 16
    pool_radius: PoolRadius = 3
    sinks: Sinks = 4
    recent: Recent = 32
    heads: Heads = "mean"
    layers: Layers = "mean"
    pool: Pool = "mean"


@register
class PeakAttention(LowestScores):
    """Ranks by the maximum over queries: a single query retrieves what an answer needs, and a mean
    would average it away. Pooling over neighbours keeps names and numbers complete.
    """

    name = "peak_attention"
    summary = "keep sinks, recent tokens, and peaks of recent attention"
    Params = PeakAttentionParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("attention_max", p.window, p.heads, p.layers, p.pool, p.pool_radius)
