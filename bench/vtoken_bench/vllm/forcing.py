"""A logits processor that forces the tokens of a request; only for `vtoken bench quality`.

`vtoken serve MODEL --logits-processors vtoken_bench.vllm.forcing:ForcedTokens`; a request lists its
tokens in `vllm_xargs`. Token i of the output is the i-th of the list; after the list, sampling is
free. vLLM takes `raw_logprobs` before logits processors run, so the log-probabilities in the
response are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vtoken_bench.forcing import ARGUMENT

Force = Callable[[list[int], torch.Tensor], torch.Tensor]


class ForcedTokens(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError; the server then responds with 400."""
        _forced(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Force | None:
        forced = _forced(params)
        if not forced:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(forced):
                logits.fill_(-torch.inf)
                logits[forced[len(output_ids)]] = 0.0
            return logits

        return force


def _forced(params: SamplingParams) -> list[int]:
    arguments: dict[str, Any] = params.extra_args or {}
    forced = arguments.get(ARGUMENT) or []
    if not isinstance(forced, list) or not all(
        type(token) is int and token >= 0 for token in forced
    ):
        raise ValueError(f"{ARGUMENT} is a list of token ids, not {forced!r}")
    return forced
