"""Random eviction: uniform over the evictable tokens, reproducible from the prompt and a seed."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from numpy.random import default_rng

from vtoken.policies.base import Params, Policy, Recent, Sinks, register
from vtoken.policies.selection import lowest
from vtoken.policies.view import TokenIds, View


class RandomParams(Params, frozen=True):
    seed: Annotated[
        int, Meta(ge=0, le=2**31 - 1, description="seeds the draw, with the prompt")
    ] = 0
    sinks: Sinks = 4
    recent: Recent = 16


@register
class RandomEviction(Policy):
    name = "random"
    summary = "evict at random, sparing the sinks and the recent window"
    Params = RandomParams

    def select_victims(self, view: View) -> TokenIds:
        rng = default_rng([self.params.seed, view.seed, view.num_tokens])
        draw = rng.random(len(view.token_ids))
        return lowest(view, draw, self.params.sinks, self.params.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.params.recent)
