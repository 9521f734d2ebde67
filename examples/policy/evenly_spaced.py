"""Keep the sinks, the recent half of the budget, and evenly spaced tokens in between."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from vtoken.policies import Params, Policy, TokenIds, View, lowest


class EvenlySpacedParams(Params, frozen=True):
    sinks: Annotated[int, Meta(ge=0, le=1024, description="first positions, always kept")] = 4


class EvenlySpaced(Policy):
    name = "evenly_spaced"
    summary = "keep sinks, the recent half, and evenly spaced tokens in between"
    Params = EvenlySpacedParams

    def select_victims(self, view: View) -> TokenIds:
        recent = view.budget_tokens // 2
        n, kept = len(view.token_ids), view.budget_tokens - self.params.sinks - recent
        scores = np.zeros(n)
        scores[np.linspace(self.params.sinks, n - recent - 1, max(kept, 0)).astype(int)] = 1.0
        return lowest(view, scores, self.params.sinks, recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks) + 2
