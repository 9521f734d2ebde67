"""TOVA: what the last query attends to least goes first (arXiv 2401.06104)."""

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


class TOVAParams(Params, frozen=True):
    sinks: Sinks = 0
    recent: Recent = 1


@register
class TOVA(Policy):
    name = "tova"
    summary = "evict the tokens with the lowest attention of the last query"
    source = "arXiv 2401.06104"
    Params = TOVAParams

    def signal(self) -> Signal:
        return Signal("attention_last")

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, self.params.sinks, self.params.recent)

    def select_many(self, batch: Batch) -> Ragged:
        return batch.lowest(self.params.sinks, self.params.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.params.recent)
