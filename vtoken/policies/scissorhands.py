"""Scissorhands: what was important stays important, counted over recent queries (arXiv 2305.17118).

A query finds a token important when it gives it at least its fair share, 1 / (tokens it can see).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

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


class ScissorhandsParams(Params, frozen=True):
    history_queries: Annotated[
        int, Meta(ge=1, le=4096, description="newest queries whose verdict counts")
    ] = 400
    sinks: Sinks = 0
    recent: Recent = 10


@register
class Scissorhands(Policy):
    name = "scissorhands"
    summary = "evict the tokens that the fewest recent queries found important; keep the newest"
    source = "arXiv 2305.17118"
    Params = ScissorhandsParams

    def signal(self) -> Signal:
        return Signal("attention_hits", self.params.history_queries)

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, self.params.sinks, self.params.recent)

    def select_many(self, batch: Batch) -> Ragged:
        return batch.lowest(self.params.sinks, self.params.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.params.recent)
