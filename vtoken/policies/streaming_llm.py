"""StreamingLLM: a few attention sinks and the most recent tokens (arXiv 2309.17453)."""

from __future__ import annotations

from vtoken.base.arrays import Ragged
from vtoken.policies.base import Params, Policy, Sinks, register
from vtoken.policies.view import Batch


class StreamingLLMParams(Params, frozen=True):
    sinks: Sinks = 4


@register
class StreamingLLM(Policy):
    name = "streaming_llm"
    summary = "keep the sinks and the most recent budget - sinks tokens"
    source = "arXiv 2309.17453"
    Params = StreamingLLMParams

    def select_many(self, batch: Batch) -> Ragged:
        return batch.oldest(self.params.sinks)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks) + 1
