"""TOVA: evicts the tokens that the last query attends to least (arXiv 2401.06104).

The paper ranks each token alone (`pool_radius` 0). The default here averages over neighbours.
"""

from __future__ import annotations

from vtoken.policies.base import LowestScores, LowestScoresParams, PoolRadius, register
from vtoken.policies.signals import Signal


class TOVAParams(LowestScoresParams, frozen=True):
    pool_radius: PoolRadius = 3


@register
class TOVA(LowestScores):
    name = "tova"
    summary = "evict the tokens with the lowest attention of the last query"
    source = "arXiv 2401.06104"
    Params = TOVAParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("attention_last", 0, p.heads, p.layers, p.pool, p.pool_radius)
