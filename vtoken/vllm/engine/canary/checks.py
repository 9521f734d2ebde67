"""The quality canary's checks: each is one more request of the engine, which evicts nothing.

Its prompt is the prompt and the output of a finished request. vLLM's prompt log-probabilities give
the probability of every generated token under the full cache. A check generates one token, the
minimum in vLLM, and its output does not leave the engine.

1. one check runs at a time. It is added to the scheduler when no request waits and its blocks are
   not needed, and is aborted as soon as they are needed: no request waits because of a check
2. it computes at most `CHUNK_TOKENS` tokens in a step, and none unless every other request decodes
   (`limit`)
3. it reads the prefix cache up to the end of the checked request's prompt, and adds nothing to it.
   Hashed blocks hold K and V of an unevicted context (ARCHITECTURE.md, rule 4)
4. token ids are kept until the check ends, for at most `MAX_QUEUED` requests
5. vLLM preempts it before any other request: it has the lowest priority, and is the last of the
   running requests. A preempted check is aborted
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from vtoken.base.arrays import Floats
from vtoken.core.runtime.canary import make_check
from vtoken.core.runtime.runtime import Runtime
from vtoken.vllm.engine.canary.samples import Sample, Samples

CHUNK_TOKENS = 64  # few enough that a decode step takes hardly longer
MAX_QUEUED = 8
MAX_WAITING = 8  # with more waiting requests, a check is aborted without counting their blocks
ID_PREFIX = "vtoken-canary-"
LOWEST_PRIORITY = 2**63  # vLLM's API takes 64 bits with a sign


class Checks:
    """The checks of one scheduler, which calls `before_step` and `after_step` around each step.

    `request`: the running check.
    """

    def __init__(self, scheduler: Any, runtime: Runtime) -> None:
        self._scheduler = scheduler
        self._runtime = runtime
        self.samples = Samples(scheduler, runtime, self._enqueue)
        self._queue: deque[Sample] = deque()
        self.request: Request | None = None
        self._sample: Sample | None = None  # what the running check is of
        self._max_tokens = 0  # of the running check in this step
        self._number = 0

    # ------------------------------------------------------------ reading

    @property
    def num_unfinished(self) -> int:
        """Checks that run or are queued; the engine keeps stepping until they end."""
        return len(self._queue) + (self.request is not None)

    def others_hold_blocks(self) -> bool:
        """Whether any request but the running check holds blocks."""
        return any(not self.is_check(request_id) for request_id in self._runtime.tables.rows)

    def is_check(self, request_id: str) -> bool:
        return self.request is not None and self.request.request_id == request_id

    @property
    def num_counted(self) -> tuple[int, int]:
        """Checks among the requests that vLLM counts as running and as waiting."""
        check = self.request
        if check is None:
            return 0, 0
        runs = any(request is check for request in self._scheduler.running)
        waits = check.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return int(runs), int(waits)

    # ------------------------------------------------------------ ends and outputs of requests

    def take_outputs(self, outputs: dict[int, Any]) -> None:
        """Remove the canary's outputs from a step's `outputs`, which vLLM keys by client."""
        if self.request is None and not self.samples:
            return
        for client, of_client in list(outputs.items()):
            kept = []
            for output in of_client.outputs:
                if self.is_check(output.request_id):
                    self._finish(output)
                    continue
                self.samples.take(output)
                kept.append(output)
            if len(kept) < len(of_client.outputs):
                of_client.outputs = kept
                rest = (of_client.scheduler_stats, of_client.finished_requests)
                if not kept and rest == (None, None):
                    del outputs[client]
        self.samples.forget_finished()

    def _enqueue(self, sample: Sample) -> None:
        if self._scheduler.pause_state != PauseState.UNPAUSED:
            self._runtime.canary.drop()
            return
        if len(self._queue) == MAX_QUEUED:
            self._queue.popleft()  # the prefix cache holds more of newer requests
            self._runtime.canary.drop()
        self._queue.append(sample)

    def _finish(self, output: Any) -> None:
        """Evaluate the running check, which ended; `output` has its prompt log-probabilities."""
        sample = self._sample
        assert sample is not None
        self._forget()
        mode = self._scheduler.vllm_config.model_config.logprobs_mode
        try:
            full, first = prompt_logprobs(output, sample)
            check = make_check(
                sample.policy,
                sample.revision,
                greedy=sample.greedy,
                own=sample.own_logprobs(),
                full=full,
                first=first,
                are_logprobs=mode in ("raw_logprobs", "processed_logprobs"),
            )
        except ValueError as error:
            self._runtime.canary.fail()
            summary = f"a quality check gave no result: {error}"
            self._runtime.events.add(self._runtime.step, "canary", summary, {"reason": str(error)})
            return
        self._runtime.canary.add(check, evicted=sample.evicted)

    # ------------------------------------------------------------ the step

    def before_step(self) -> None:
        """Start, pause, continue or abort a check, before a step is planned and scheduled."""
        if not self.num_unfinished:
            return
        scheduler = self._scheduler
        others = [r for r in scheduler.running if r is not self.request]
        queues = chain(scheduler.kv_holding_waiting, scheduler.waiting)
        waiting = [r for r in queues if r is not self.request]
        if self.request is not None and (
            self.request.status != RequestStatus.RUNNING  # ended from outside
            or not self._has_room(others, waiting, 0)
        ):
            self._drop()
        is_quiet = not waiting and all(_num_left(request, 2) <= 1 for request in others)
        self._max_tokens = CHUNK_TOKENS if is_quiet else 0
        if self.request is None:
            if is_quiet:
                self._start(others)
        else:
            self._go_last()

    def _go_last(self) -> None:
        """Without priorities, vLLM preempts the last of the running requests first."""
        running = self._scheduler.running
        if running[-1] is not self.request:
            running.remove(self.request)
            running.append(self.request)

    def limit(self, num_new_tokens: int) -> int:
        """How many of the `num_new_tokens` that vLLM gives the running check it computes."""
        if num_new_tokens <= self._max_tokens:
            return num_new_tokens
        chunked = self._scheduler.scheduler_config.enable_chunked_prefill
        return self._max_tokens if chunked else 0

    def after_step(self) -> None:
        """Abort the check if the scheduled step has not admitted it or has preempted it."""
        if self.request is not None and self.request.status != RequestStatus.RUNNING:
            self._drop()

    def _has_room(self, others: list[Request], waiting: list[Request], num_blocks: int) -> bool:
        """Whether all other requests have enough blocks if a check takes `num_blocks` more."""
        runtime, scheduler = self._runtime, self._scheduler
        config, admission, size = runtime.config, runtime.admission, runtime.geometry.block_size
        if len(waiting) > MAX_WAITING:
            return False
        if len(others) + len(waiting) >= scheduler.max_num_active_reqs:
            return False
        chunk = runtime.shape.max_chunk_tokens
        sizes = [size, *(group.block_size for group in runtime.other_groups)]
        left = [_num_left(request, chunk) for request in others]
        needed = config.headroom_blocks + sum(1 + n // each for n in left for each in sizes)
        for request in waiting:
            peak = admission.peak_tokens(request.request_id, request.num_tokens)
            beside = runtime.demand.most_of_others(request.num_tokens, chunk)
            requirement = admission.requirement(request.request_id, peak, beside)
            needed += -(-peak // size) + beside + requirement.extra_blocks
            needed += int(scheduler.kv_cache_manager.watermark_blocks)
        if num_blocks:
            needed = max(needed, admission.requirement(ID_PREFIX, num_blocks * size).extra_blocks)
        table = runtime.tables.get(runtime.canary.request_id or "")
        free, held = runtime.store.num_free_blocks(), 0 if table is None else table.num_blocks
        if free + held > config.low_watermark_blocks:  # a check must not open this gate
            needed = max(needed, config.low_watermark_blocks)
        return free - num_blocks > needed

    def _start(self, others: list[Request]) -> None:
        """Begin the first check of the queue if its blocks are free; drop checks that never fit."""
        size = self._runtime.geometry.block_size
        while self._queue:
            sample = self._queue[0]
            num_tokens = len(sample.token_ids) + 1
            num_blocks = -(-num_tokens // size)
            num_blocks += self._runtime.demand.most_of_others(num_tokens, self._max_tokens)
            has_room = self._has_room(others, [], num_blocks)
            if not has_room and others:
                return  # blocks may become free
            self._queue.popleft()
            if has_room:
                self._begin(sample)
                return
            self._runtime.canary.drop()

    def _begin(self, sample: Sample) -> None:
        self._number += 1
        request = Request(
            f"{ID_PREFIX}{self._number}",
            sample.token_ids,
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                prompt_logprobs=1,
                detokenize=False,
                skip_reading_prefix_cache=False,
            ),
            None,
            priority=LOWEST_PRIORITY,
        )
        request.block_hashes = sample.block_hashes
        self.request, self._sample = request, sample
        self._runtime.announce_check(request.request_id)
        self._scheduler.add_request(request)

    def _drop(self) -> None:
        """Abort the running check."""
        assert self.request is not None
        self._scheduler.finish_requests(self.request.request_id, RequestStatus.FINISHED_ABORTED)
        self._forget()
        self._runtime.canary.drop()

    def _forget(self) -> None:
        self.request = self._sample = self._runtime.canary.request_id = None

    def drop_all(self) -> None:
        """Abort the running check and the queue.

        For a pause, a reset of the prefix cache, or when all requests are aborted.
        """
        if self.request is not None:
            self._drop()
        self._runtime.canary.drop(len(self._queue))
        self._queue.clear()

    def weights_changed(self) -> int:
        """Check nothing that was generated until now; returns how many outputs were to be."""
        num_dropped = self.num_unfinished + self.samples.outdate()
        self.drop_all()
        return num_dropped


def _num_left(request: Request, most: int) -> int:
    """Tokens of the request that the next step can compute, `most` at most."""
    num_tokens = request.num_tokens + request.num_output_placeholders
    return int(min(num_tokens - request.num_computed_tokens, most))


def prompt_logprobs(output: Any, sample: Sample) -> tuple[Floats, Floats]:
    """Log-probabilities [n] of the n generated tokens, and [n] of the most likely ones.

    Raises ValueError when `output` has none, or has those of different tokens.
    """
    tensors, n = output.new_prompt_logprobs_tensors, sample.num_generated_tokens
    if tensors is None or len(tensors.logprobs) < n:
        raise ValueError(
            f"the engine returned no prompt log-probabilities ({output.finish_reason})"
        )
    # Indexed from the end: rows of tokens from the prefix cache are missing or uninitialised.
    if tensors.logprob_token_ids[-n:, 0].tolist() != sample.token_ids[-n:]:
        raise ValueError("the prompt log-probabilities are of different tokens")
    logprobs = tensors.logprobs[-n:].numpy().astype(np.float32)
    return logprobs[:, 0], logprobs[:, 1]
