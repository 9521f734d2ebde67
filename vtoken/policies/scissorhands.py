"""Scissorhands: important tokens stay important, counted over recent queries (arXiv 2305.17118).

A token is important to a query that gives it at least the mean attention, 1 / (tokens it can see).
The paper's form: `history_queries` 400.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vtoken.policies.base import Heads, Layers, LowestScores, Params, Recent, Sinks, register
from vtoken.policies.signals import Signal


class ScissorhandsParams(Params, frozen=True):
    history_queries: Annotated[
        int, Meta(ge=1, le=4096, description="newest queries to score by")
    ] = 16
    sinks: Sinks = 0
    recent: Recent = 10
    heads: Heads = "mean"
    layers: Layers = "mean"


@register
class Scissorhands(LowestScores):
    name = "scissorhands"
    summary = "evict the tokens important to the fewest recent queries"
    source = "arXiv 2305.17118"
    Params = ScissorhandsParams

    def signal(self) -> Signal:
        p = self.params
        return Signal("attention_hits", p.history_queries, p.heads, p.layers)
