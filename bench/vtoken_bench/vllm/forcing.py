"""A logits processor that forces the tokens of a request; only for benchmarks.

`vtoken serve MODEL --logits-processors vtoken_bench.vllm.forcing:ForcedTokens`; a request lists its
tokens in `vllm_xargs`. Token i of the output is the i-th of the list; where that is `FREE`, and
after the list, sampling is free. vLLM takes `raw_logprobs` before logits processors run, so the
log-probabilities in the response are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as LogitsProcessorV2,
)

from vtoken_bench.forcing import ARGUMENT, FREE

Force = Callable[[list[int], torch.Tensor], torch.Tensor]


class ForcedTokens(AdapterLogitsProcessor, LogitsProcessorV2):
    """For model runner V1, which asks for a function a request, and V2, which passes the batch."""

    def __init__(self, vllm_config: Any, *arguments: Any) -> None:
        self._by_slot: dict[int, list[int]] = {}
        if len(arguments) == 1:  # V2: the states of all requests
            (self._states,) = arguments
        else:
            super().__init__(vllm_config, *arguments)

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
            if len(output_ids) < len(forced) and forced[len(output_ids)] != FREE:
                logits.fill_(-torch.inf)
                logits[forced[len(output_ids)]] = 0.0
            return logits

        return force

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Only V2 calls it."""
        self._by_slot[req_idx] = _forced(sampling_params)
        return bool(self._by_slot[req_idx])

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Only V2 passes `ctx`. Its logits have one row a request, without speculative decoding."""
        if ctx is None:
            return super().apply(logits)
        rows = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
        for row, (slot, num_tokens) in enumerate(rows):
            forced = self._by_slot[slot]
            number = num_tokens - int(self._states.prompt_len.np[slot])  # below 0 in a prompt
            if 0 <= number < len(forced) and forced[number] != FREE:
                logits[row] = -torch.inf
                logits[row, forced[number]] = 0.0
        return logits


def _forced(params: SamplingParams) -> list[int]:
    arguments: dict[str, Any] = params.extra_args or {}
    forced = arguments.get(ARGUMENT) or []
    if not isinstance(forced, list) or not all(
        type(token) is int and (token >= 0 or token == FREE) for token in forced
    ):
        raise ValueError(f"{ARGUMENT} is a list of token ids and {FREE}, not {forced!r}")
    return forced
