"""SnapKV: attention of the last window's queries, pooled over neighbours (arXiv 2404.14469)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from vtoken.policies.base import Params, Policy, Sinks, TokenIds, View, lowest, register
from vtoken.policies.signals import Signal


class SnapKVParams(Params, frozen=True):
    window: Annotated[
        int, Meta(ge=1, le=512, description="newest queries that are asked; their tokens stay")
    ] = 64
    pool_radius: Annotated[
        int, Meta(ge=0, le=32, description="live neighbours a side to average over; kernel 2r + 1")
    ] = 2
    sinks: Sinks = 0


@register
class SnapKV(Policy):
    name = "snapkv"
    summary = "keep what the last window of queries attends to, pooled over neighbours; keep it too"
    source = "arXiv 2404.14469"
    Params = SnapKVParams

    def signal(self) -> Signal:
        return Signal("attention_window", self.params.window)

    def select_victims(self, view: View) -> TokenIds:
        radius, scores = self.params.pool_radius, view.scores.copy()
        before = scores[: -self.params.window]  # nothing of the window leaks into its neighbours
        kernel = np.full(2 * radius + 1, 1 / (2 * radius + 1), dtype=np.float32)
        before[:] = np.convolve(before, kernel)[radius : radius + len(before)]
        return lowest(view, scores, self.params.sinks, self.params.window)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.params.window)
