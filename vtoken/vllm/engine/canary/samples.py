"""Selects the requests that the quality canary samples, and collects their log-probabilities.

Uses vLLM's requests and outputs; `checks` runs the checks. A request is sampled on arrival, because
its own log-probabilities must be computed while it runs. A copy of its sampling parameters requests
them, and they are removed from its outputs unless the client requested them. At its end, the share
for requests that evicted, or the one for those that did not, decides whether it is checked.

A stop string ends a request outside of the engine, which sees only that it is aborted. An aborted
request with stop strings counts as finished if it has generated a token: whether a stop string or
its client ended it, its tokens were generated like those of any other request.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vtoken.base.arrays import Floats
from vtoken.core.runtime.runtime import Runtime

FINISHED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass(slots=True)
class Sample:
    """A sampled request, from its arrival until its check ends.

    `draw`: uniform in 0..1. `own`: log-probabilities of its outputs so far, None if unknown;
    `strip`: the client did not request them. `revision`: 0 before it starts. `outdated`: the
    weights have changed since.

    The others are set at its end, if it is to be checked: `token_ids`, its prompt and its n
    generated tokens; `block_hashes`, of the prompt's full blocks that the check may read from the
    prefix cache.
    """

    draw: float
    own: list[Floats] | None
    strip: bool
    revision: int = 0
    evicted: bool = False
    outdated: bool = False
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    block_hashes: list[Any] = field(default_factory=list)
    policy: str = ""
    greedy: bool = False

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def own_logprobs(self) -> Floats | None:
        """Those [n] with which its tokens were sampled; None if unknown."""
        own = None if self.own is None else np.concatenate(self.own)[: self.num_generated_tokens]
        return own if own is not None and len(own) == self.num_generated_tokens else None


class Samples:
    """The sampled requests of one scheduler, which calls a method at each event of a request.

    `check` is called with each that is to be checked, once its last output has been read.
    """

    def __init__(self, scheduler: Any, runtime: Runtime, check: Callable[[Sample], None]) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self._check = check
        self._samples: dict[str, Sample] = {}
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
        reason = self._skip_reason(request)
        if reason is not None:
            self._runtime.canary.skip(reason)
            return
        # The values of other modes are not comparable with prompt log-probabilities.
        comparable = self._scheduler.vllm_config.model_config.logprobs_mode == "raw_logprobs"
        strip = comparable and request.sampling_params.num_logprobs is None
        if strip:
            request.sampling_params = copy.copy(request.sampling_params)
            request.sampling_params.logprobs = 0
        self._samples[request_id] = Sample(draw, [] if comparable else None, strip)

    def _skip_reason(self, request: Request) -> str | None:
        """The reason why the request cannot be checked; None when it can."""
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
        return next((reason for reason, applies in reasons.items() if applies), None)

    def started(self, request_ids: Iterable[str]) -> None:
        """Requests that get their first blocks, or blocks after a preemption, in this step."""
        if self._samples:
            for request_id in request_ids:
                sample = self._samples.get(request_id)
                if sample is not None and not sample.revision:
                    sample.revision = self._runtime.revision

    def outdate(self) -> int:
        """Let no request be checked that has begun; returns how many were to be."""
        begun = [s for s in self._samples.values() if s.revision and not s.outdated]
        for sample in begun:
            sample.outdated = True
        return len(begun)

    def preempted(self, request_id: str) -> None:
        """Call before a preempted request frees its blocks; it will recompute its context."""
        sample = self._samples.get(request_id)
        if sample is not None:
            sample.evicted |= self._has_evicted(request_id)

    def ended(self, request: Request) -> None:
        """Call when a request ended, before it frees its blocks."""
        sample = self._samples.get(request.request_id)
        if sample is None:
            return
        self._finish(request, sample)
        if request.status not in FINISHED:  # no output of it is pending
            del self._samples[request.request_id]
            if sample.token_ids:
                self._check(sample)

    def _finish(self, request: Request, sample: Sample) -> None:
        """Set the tokens of `sample` if the request, which ended, is to be checked."""
        runtime, config = self._runtime, self._runtime.config.canary
        sample.evicted |= self._has_evicted(request.request_id)
        share = config.share if sample.evicted else config.control_share
        if config.share == 0 or sample.draw >= share:
            return
        limit = self._scheduler.max_model_len - 1  # the check generates one more token
        num_prompt = request.num_prompt_tokens
        if not _is_complete(request):
            runtime.canary.skip("aborted")
        elif sample.outdated:
            runtime.canary.skip("weights changed")
        elif sample.revision != runtime.effective[1]:
            runtime.canary.skip("revision changed")
        elif num_prompt >= limit:
            runtime.canary.skip("max_model_len")
        else:
            # Recompute the prompt's last token: its logits rank the first generated token.
            num_hashes = (num_prompt - 1) // self._scheduler.hash_block_size
            sample.token_ids = list(request.all_token_ids[:limit])
            sample.num_prompt_tokens = num_prompt
            sample.block_hashes = list(request.block_hashes[:num_hashes])
            sample.policy = runtime.requests.rules(request.request_id).policy.name
            sample.greedy = is_greedy(request.sampling_params)

    def _has_evicted(self, request_id: str) -> bool:
        table = self._runtime.tables.get(request_id)
        return table is not None and table.num_dead > 0

    def take(self, output: Any) -> None:
        """Read one output, and remove from it what the client did not request."""
        sample = self._samples.get(output.request_id)
        if sample is None:
            return
        if sample.own is not None and output.new_token_ids:
            logprobs = _own_logprobs(output)
            if logprobs is None:
                sample.own = None
            else:
                sample.own.append(logprobs)
        if sample.strip:
            output.new_logprobs = None
        if sample.token_ids:
            self._check(sample)

    def forget_finished(self) -> None:
        """Forget requests that ended; their last output is in the step in which they end."""
        for request_id in [i for i in self._samples if i not in self._scheduler.requests]:
            del self._samples[request_id]


def _is_complete(request: Request) -> bool:
    """Whether the request, which ended, generated what it was to generate; see the module."""
    if request.status in FINISHED:
        return True
    return bool(
        request.status == RequestStatus.FINISHED_ABORTED
        and request.sampling_params.stop
        and request.num_output_tokens
    )


def _own_logprobs(output: Any) -> Floats | None:
    """Log-probabilities [n] of the new tokens; None if the sampled token is not the first of its
    row, as with `logprobs=-1`.
    """
    new = output.new_logprobs
    if new is None or new.logprob_token_ids.ndim != 2:
        return None
    if new.logprob_token_ids[:, 0].tolist() != list(output.new_token_ids):
        return None
    return np.array(new.logprobs[:, 0], dtype=np.float32)


def is_greedy(params: SamplingParams) -> bool:
    """Whether every token is the one with the model's largest logit."""
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
