"""FastGen: the smallest structure that explains the prompt's attention rules (arXiv 2310.01801).

The paper profiles with all queries of the prompt, `queries` 512 is the most here.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from vtoken.policies.base import Params, Policy, register
from vtoken.policies.signals import Signal
from vtoken.policies.view import TokenIds, View


class FastGenParams(Params, frozen=True):
    recovery: Annotated[float, Meta(ge=0, le=1, description="share of attention to hold")] = 0.9
    heavy: Annotated[float, Meta(ge=0, le=1, description="share of tokens, by attention")] = 0.3
    window: Annotated[float, Meta(ge=0, le=1, description="share of tokens, the newest")] = 0.3
    queries: Annotated[int, Meta(ge=1, le=512, description="newest queries to score by")] = 16


@register
class FastGen(Policy):
    name = "fastgen"
    summary = "keep the kinds of tokens that the prompt's attention needs"
    source = "arXiv 2310.01801"
    needs, profiles, Params = frozenset({"token_ids"}), True, FastGenParams

    def signal(self) -> Signal:
        return Signal("attention_window", self.params.queries)

    def _parts(self, view: View, size: int) -> list[Any]:
        n, rank = len(view.token_ids), np.argsort(np.argsort(view.scores, kind="stable"))
        heavy = rank >= n - int(self.params.heavy * size)
        window = np.arange(n) >= n - int(self.params.window * size)
        return [view.special, view.punctuation, heavy, window]

    def profile(self, view: View) -> int:
        """The fewest parts that together hold enough attention; 5 if all four do not."""
        mass = np.nan_to_num(view.scores.astype(np.float64), posinf=0, neginf=0)
        held = np.logical_or.accumulate(self._parts(view, len(mass))) @ mass
        return 1 + int(np.argmax([*(held >= self.params.recovery * mass.sum()), True]))

    def select_victims(self, view: View) -> TokenIds:
        parts, ids = self._parts(view, view.budget_tokens)[: view.profile], view.token_ids
        ranks = np.max([part * rank for part, rank in zip(parts, (4, 1, 2, 3), strict=False)], 0)
        order = np.lexsort((view.scores if view.profile == 5 else ids, ranks))
        victims: TokenIds = ids[order[order < len(ids) - 1][: view.num_victims]]
        return victims
