"""TOVA: evicts the tokens that the last query attends to least (arXiv 2401.06104).

The paper takes the mean over heads and ranks each token alone: `heads` "mean", `pool_radius` 0.
"""

from __future__ import annotations

from vtoken.policies.base import Heads, LowestScores, LowestScoresParams, PoolRadius, register
from vtoken.policies.signals import Signal


class TOVAParams(LowestScoresParams, frozen=True):
    heads: Heads = "max"
    pool_radius: PoolRadius = 5


@register
class TOVA(LowestScores):
    name = "tova"
    summary = "evict the tokens with the lowest attention of the last query"
    source = "arXiv 2401.06104"
    Params = TOVAParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("attention_last", 0, p.heads, p.layers, p.pool, p.pool_radius)
