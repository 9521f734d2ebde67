"""K-norm: keys of low norm draw much attention, so they stay (arXiv 2406.11430).

The paper ranks each token by itself, `pool_radius` 0. Its neighbours are averaged in by default.
"""

from __future__ import annotations

from vtoken.policies.base import LowestScores, LowestScoresParams, PoolRadius, register
from vtoken.policies.signals import Signal


class KNormParams(LowestScoresParams, frozen=True):
    pool_radius: PoolRadius = 3


@register
class KNorm(LowestScores):
    name = "knorm"
    summary = "keep the tokens whose keys have the lowest norm"
    source = "arXiv 2406.11430"
    Params = KNormParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("key_norm", 0, p.heads, p.layers, p.pool, p.pool_radius)
