"""K-norm: keys of low norm draw much attention, so they stay (arXiv 2406.11430)."""

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


class KNormParams(Params, frozen=True):
    sinks: Sinks = 0
    recent: Recent = 1


@register
class KNorm(Policy):
    name = "knorm"
    summary = "keep the tokens whose keys have the lowest norm"
    source = "arXiv 2406.11430"
    Params = KNormParams

    def signal(self) -> Signal:
        return Signal("key_norm")

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, self.params.sinks, self.params.recent)

    def select_many(self, batch: Batch) -> Ragged:
        return batch.lowest(self.params.sinks, self.params.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.params.recent)
