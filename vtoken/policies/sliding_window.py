"""Sliding window: the most recent tokens and nothing else."""

from __future__ import annotations

from vtoken.arrays import Ragged
from vtoken.policies.base import Batch, Policy, TokenIds, View, oldest, register


@register
class SlidingWindow(Policy):
    name = "sliding_window"
    summary = "keep the most recent budget tokens; without sinks quality collapses"

    def select_victims(self, view: View) -> TokenIds:
        return oldest(view, sinks=0)

    def select_many(self, batch: Batch) -> Ragged:
        return batch.oldest(sinks=0)
