"""Which requests the quality canary samples, and what is known of one when it has finished.

Knows vLLM's requests and outputs, not how a check is run. Whether a request is sampled is decided
when it arrives, since its own log-probabilities must be computed as it runs. Its sampling
parameters become a copy that asks for them, and they are taken out of its outputs again where its
client did not ask. Whether it is checked is decided when it ends, by whether it has evicted.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vtoken.arrays import Floats
from vtoken.runtime.runtime import Runtime

FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(slots=True)
class Finished:
    """A finished request that is to be checked.

    `token_ids`: its prompt and its n generated tokens; `block_hashes`: of the prompt's full blocks,
    as far as the prefix cache may be read. `own` [n]: log-probabilities with which its tokens were
    sampled, None: unknown.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    block_hashes: list[Any]
    policy: str
    revision: int
    evicted: bool
    greedy: bool
    own: Floats | None = None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True)
class _Sample:
    """A sampled request while it runs. `draw`: uniform in 0..1. `revision`: 0 before it starts.

    `own`: log-probabilities of its outputs so far, None where they are not known; `strip`: its
    client did not ask for them. `finished`: it is over, and its last output is on its way.
    """

    draw: float
    own: list[Floats] | None
    strip: bool
    revision: int = 0
    evicted: bool = False
    finished: Finished | None = None


class Samples:
    """The sampled requests of one scheduler, which says what happens to requests."""

    def __init__(self, scheduler: Any, runtime: Runtime) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._samples: dict[str, _Sample] = {}
        self._random = random.Random()

    def __len__(self) -> int:
        return len(self._samples)

    def arrived(self, request: Request) -> None:
        config, request_id = self._runtime.config.canary, request.request_id
        if config.share == 0 or request_id in self._scheduler.requests:
            return
        draw = self._random.random()
        if draw >= max(config.share, config.control_share):
            return
        self._runtime.canary.used = True
        reason = self._why_not(request)
        if reason is not None:
            self._runtime.canary.skip(reason)
            return
        # Other modes report what does not compare with prompt log-probabilities.
        comparable = self._scheduler.vllm_config.model_config.logprobs_mode == "raw_logprobs"
        strip = comparable and request.sampling_params.num_logprobs is None
        if strip:
            request.sampling_params = copy.copy(request.sampling_params)
            request.sampling_params.logprobs = 0
        self._samples[request_id] = _Sample(draw, [] if comparable else None, strip)

    def _why_not(self, request: Request) -> str | None:
        """Why the request cannot be checked; None when it can."""
        if request.sampling_params is None:
            return "pooling"
        has_embeddings = request.prompt_token_ids is None or request.prompt_embeds is not None
        no_logprobs = self._scheduler.vllm_config.cache_config.kv_sharing_fast_prefill
        reasons = {
            "kv_sharing_fast_prefill": no_logprobs,
            "session": request.resumable,
            "prompt embeddings": has_embeddings,
            "multimodal": bool(request.mm_features),
            "LoRA": request.lora_request is not None,
            "structured output": request.use_structured_output,
        }
        return next((reason for reason, found in reasons.items() if found), None)

    def started(self, request_ids: Iterable[str]) -> None:
        """Requests that get their first blocks in the step being planned, or get blocks again."""
        if self._samples:
            for request_id in request_ids:
                sample = self._samples.get(request_id)
                if sample is not None and not sample.revision:
                    sample.revision = self._runtime.state.revision

    def preempted(self, request_id: str) -> None:
        """The request is about to let go of its blocks, and will compute its context again."""
        sample = self._samples.get(request_id)
        if sample is not None:
            sample.evicted |= self._has_evicted(request_id)

    def ends(self, request: Request) -> None:
        """The request is over, and about to let go of its blocks."""
        sample = self._samples.get(request.request_id)
        if sample is None or request.status not in FINISHED:
            return
        runtime, config = self._runtime, self._runtime.config.canary
        evicted = sample.evicted or self._has_evicted(request.request_id)
        share = config.share if evicted else config.control_share
        if config.share == 0 or sample.draw >= share:
            return
        limit = self._scheduler.max_model_len - 1  # vLLM generates one token more
        num_prompt = request.num_prompt_tokens
        if sample.revision != runtime.state.effective[1]:
            runtime.canary.skip("revision changed")
        elif num_prompt >= limit:
            runtime.canary.skip("max_model_len")
        else:
            # The prompt's last token is computed again: it ranks the first generated one.
            num_hashes = (num_prompt - 1) // self._scheduler.hash_block_size
            sample.finished = Finished(
                list(request.all_token_ids[:limit]),
                num_prompt,
                list(request.block_hashes[:num_hashes]),
                runtime.state.rules(request.request_id).policy.name,
                sample.revision,
                evicted,
                is_greedy(request.sampling_params),
            )

    def _has_evicted(self, request_id: str) -> bool:
        table = self._runtime.tables.get(request_id)
        return table is not None and table.num_dead > 0

    def take(self, output: Any) -> Finished | None:
        """Read one output; the request, if that was the last one of a request to be checked."""
        sample = self._samples.get(output.request_id)
        if sample is None:
            return None
        if sample.own is not None and output.new_token_ids:
            found = _own_logprobs(output)
            if found is None:
                sample.own = None
            else:
                sample.own.append(found)
        if sample.strip:
            output.new_logprobs = None
        finished = sample.finished
        if finished is not None and sample.own is not None:
            own = np.concatenate(sample.own)[: finished.num_generated_tokens]
            finished.own = own if len(own) == finished.num_generated_tokens else None
        return finished

    def forget_finished(self) -> None:
        """The last output of a request comes in the step in which it ends: forget those."""
        for request_id in [i for i in self._samples if i not in self._scheduler.requests]:
            del self._samples[request_id]


def _own_logprobs(output: Any) -> Floats | None:
    """Of the new tokens [n]; None where the sampled token is not the first of its row, as with
    `logprobs=-1`."""
    found = output.new_logprobs
    if found is None or found.logprob_token_ids.ndim != 2:
        return None
    if found.logprob_token_ids[:, 0].tolist() != list(output.new_token_ids):
        return None
    return np.array(found.logprobs[:, 0], dtype=np.float32)


def is_greedy(params: SamplingParams) -> bool:
    """Whether every token is the one of the largest logit, as the model gave it."""
    return bool(
        params.temperature == 0
        and params.repetition_penalty == 1
        and params.presence_penalty == params.frequency_penalty == 0
        and params.min_tokens == 0
        and params.thinking_token_budget is None
        and not params.logit_bias
        and not params.bad_words
        and not params.allowed_token_ids
        and not params.trace_decode_token_ids
    )
