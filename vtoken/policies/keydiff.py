"""KeyDiff: tokens whose keys resemble the average key are the least useful (arXiv 2504.15364)."""

from __future__ import annotations

from vtoken.policies.base import LowestScores, register
from vtoken.policies.signals import Signal


@register
class KeyDiff(LowestScores):
    name = "keydiff"
    summary = "evict the tokens whose keys are most similar to the average key"
    source = "arXiv 2504.15364"

    def signal(self) -> Signal:
        p = self.params
        return Signal("key_difference", 0, p.heads, p.layers, p.pool, p.pool_radius)
