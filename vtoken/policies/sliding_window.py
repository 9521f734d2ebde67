"""Sliding window: the most recent tokens and nothing else."""

from __future__ import annotations

from vtoken.policies.base import Policy, TokenIds, View, lowest, register


@register
class SlidingWindow(Policy):
    name = "sliding_window"
    summary = "keep the most recent budget tokens; without sinks quality collapses"

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.token_ids, sinks=0, recent=1)
