"""Sliding window: the most recent tokens and nothing else."""

from __future__ import annotations

from vtoken.base.arrays import Ragged
from vtoken.policies.base import Policy, register
from vtoken.policies.view import Batch


@register
class SlidingWindow(Policy):
    name = "sliding_window"
    summary = "keep the most recent tokens; without sinks quality collapses"

    def select_many(self, batch: Batch) -> Ragged:
        return batch.oldest(sinks=0)
