"""KeyDiff: tokens whose keys resemble the average key say the least (arXiv 2504.15364)."""

from __future__ import annotations

from vtoken.arrays import Ragged
from vtoken.policies.base import (
    Batch,
    Params,
    Policy,
    Recent,
    Sinks,
    TokenIds,
    View,
    lowest,
    register,
)
from vtoken.policies.signals import Signal


class KeyDiffParams(Params, frozen=True):
    sinks: Sinks = 0
    recent: Recent = 1


@register
class KeyDiff(Policy):
    name = "keydiff"
    summary = "evict the tokens whose keys are most similar to the average key"
    source = "arXiv 2504.15364"
    Params = KeyDiffParams

    def signal(self) -> Signal:
        return Signal("key_difference")

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, self.params.sinks, self.params.recent)

    def select_many(self, batch: Batch) -> Ragged:
        return batch.lowest(self.params.sinks, self.params.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.params.recent)
