"""K-norm: keys of low norm receive much attention, so they are kept (arXiv 2406.11430).

The paper's form ranks each token alone and keeps no window: `pool_radius` 0, `recent` 1.
"""

from __future__ import annotations

from vtoken.policies.base import LowestScores, LowestScoresParams, PoolRadius, Recent, register
from vtoken.policies.signals import Signal


class KNormParams(LowestScoresParams, frozen=True):
    recent: Recent = 16
    pool_radius: PoolRadius = 2


@register
class KNorm(LowestScores):
    name = "knorm"
    summary = "keep the tokens whose keys have the lowest norm"
    source = "arXiv 2406.11430"
    Params = KNormParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("key_norm", 0, p.heads, p.layers, p.pool, p.pool_radius)
