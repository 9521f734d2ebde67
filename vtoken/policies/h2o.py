"""H2O: heavy hitters by accumulated attention, and the recent window (arXiv 2306.14048).

The paper's form: `recent_ratio` 0.5, `sinks` 0, `pool_radius` 0.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from vtoken.base.arrays import Ragged
from vtoken.policies.base import Params, Policy, Pool, PoolRadius, Sinks, register
from vtoken.policies.selection import lowest
from vtoken.policies.signals import Signal
from vtoken.policies.view import Batch, TokenIds, View


class H2OParams(Params, frozen=True):
    recent_ratio: Annotated[
        float, Meta(ge=0.0, le=1.0, description="share of the budget kept for the newest tokens")
    ] = 0.25
    sinks: Sinks = 4
    normalize: Annotated[bool, Meta(description="divide by the queries that saw a token")] = False
    pool: Pool = "mean"
    pool_radius: PoolRadius = 3


@register
class H2O(Policy):
    name = "h2o"
    summary = "keep recent tokens and those with the most attention so far"
    source = "arXiv 2306.14048"
    Params = H2OParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("attention_sum", pool=p.pool, pool_radius=p.pool_radius)

    def select_many(self, batch: Batch) -> Ragged:
        if self.params.normalize:
            return Ragged.joined(map(self._by_mean, batch.views()))
        recent = np.array([self._recent(budget) for budget in batch.budget.tolist()])
        return batch.lowest(self.params.sinks, recent)

    def _by_mean(self, view: View) -> TokenIds:
        """The victims of one request by the mean over the queries that saw a token."""
        scores = view.scores / (view.num_tokens - view.token_ids).astype(np.float32)
        return lowest(view, scores, self.params.sinks, self._recent(view.budget_tokens))

    def _recent(self, budget: int) -> int:
        return int(min(int(budget * self.params.recent_ratio), budget - self.params.sinks))

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks) + 1
