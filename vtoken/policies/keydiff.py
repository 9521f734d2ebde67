"""KeyDiff: tokens whose keys resemble the average key are the least useful (arXiv 2504.15364).

The paper's form takes the mean over heads, ranks each token alone, keeps no window and averages the
keys of the live tokens: `heads` "mean", `pool_radius` 0, `recent` 1, `anchor` "live".

The default is the average of every token seen. A cut removes what resembles the average, so that of
the live tokens moves towards what is left, and the next cut ranks by it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vtoken.policies.base import (
    Heads,
    LowestScores,
    LowestScoresParams,
    PoolRadius,
    Recent,
    register,
)
from vtoken.policies.signals import Anchor, Signal

AnchorChoice = Annotated[
    Anchor, Meta(description="whose average key: of the live tokens, or of every token seen so far")
]


class KeyDiffParams(LowestScoresParams, frozen=True):
    recent: Recent = 16
    heads: Heads = "max"
    pool_radius: PoolRadius = 3
    anchor: AnchorChoice = "seen"


@register
class KeyDiff(LowestScores):
    name = "keydiff"
    summary = "evict tokens whose keys are most similar to the average key"
    source = "arXiv 2504.15364"
    Params = KeyDiffParams

    def signal(self) -> Signal:
        p = self.params
        return Signal(
            "key_difference", 0, p.heads, p.layers, p.pool, p.pool_radius, anchor=p.anchor
        )
