"""vToken in vLLM's scheduler: plans before vLLM allocates, commits after, publishes the result.

The runtime tracks a request from its first scheduled step until its blocks are freed. `schedule`
makes all decisions about a step; commands run between two steps, in the same thread.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

import vtoken
from vtoken.base.errors import RefusedError, UnsupportedError
from vtoken.control.controller import Controller
from vtoken.control.facts import EngineFacts
from vtoken.control.report import Reporter
from vtoken.control.telemetry import Publisher
from vtoken.core import selftest
from vtoken.core.config.request_rules import Prompt, RequestRules, request_rules
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.runtime.growth import Scheduled
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.losses import answer_report
from vtoken.core.runtime.runtime import Runtime
from vtoken.policies import make_policy
from vtoken.vllm.drafts import num_drafts, num_rejected
from vtoken.vllm.engine.canary.scheduler import CanarySchedulerMixin
from vtoken.vllm.engine.coordinator import VTokenCoordinatorMixin
from vtoken.vllm.engine.groups import other_groups
from vtoken.vllm.engine.manager import VLLMBlockStore
from vtoken.vllm.engine.queue import SchedulerQueue, is_idle
from vtoken.vllm.engine.tokenizer import VLLMChats, VLLMVocabulary
from vtoken.vllm.spec import ManagedGroup
from vtoken.vllm.startup import startup_error, support
from vtoken.vllm.startup.settings import initial_config, read_settings
from vtoken.wire import Geometry, SchedulingState

log = init_logger("vllm.vtoken")
SCHEDULING: dict[PauseState, SchedulingState] = {
    PauseState.UNPAUSED: "running",
    PauseState.PAUSED_NEW: "paused_new",
    PauseState.PAUSED_ALL: "paused",
}


def _geometry(config: Any, kv_cache_config: Any, group: ManagedGroup) -> Geometry:
    """The geometry of the managed `group` in the entire engine.

    A rank holds its KV heads' share of every block. Bytes include the copies of heads that exist if
    there are more ranks than heads. With several pipeline stages `group` has the first one's layers
    alone, and every stage checks the number of all (`support.check_stages`).
    """
    ranks, spec, layers = (
        config.parallel_config.tensor_parallel_size,
        group.spec,
        len(group.layer_names),
    )
    if config.parallel_config.pipeline_parallel_size > 1:
        layers = support.num_full_layers(config.model_config)
    block_bytes = (layers + len(group.drafter_names)) * spec.page_size_bytes
    if group.drafter_names and len(kv_cache_config.kv_cache_groups) == 1:
        block_bytes = _block_bytes(config, kv_cache_config)  # its K and V may have another shape
    return Geometry(
        num_blocks=kv_cache_config.num_blocks,
        block_size=spec.block_size,
        num_layers=layers,
        num_kv_heads=config.model_config.get_total_num_kv_heads(),
        head_size=spec.head_size,
        bytes_per_token=ranks * block_bytes // spec.block_size,
        num_heads=ranks * config.model_config.get_num_attention_heads(config.parallel_config),
    )


def _block_bytes(config: Any, kv_cache_config: Any) -> int:
    """The bytes of a block of the pool on one rank; 0 if they differ between stages."""
    if config.parallel_config.pipeline_parallel_size > 1:
        return 0
    allocation, *_ = kv_cache_config.kv_cache_tensors  # all lie in one, whose size each has
    return int(allocation.size // kv_cache_config.num_blocks)


class VTokenSchedulerMixin(Scheduler):
    """Everything but the quality canary, which stands before it in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config
        kv_cache_config: Any = self.kv_cache_config
        support.check_config(config)
        support.check_scheduler(config, is_async=isinstance(self, AsyncScheduler))
        group = support.managed_group(kv_cache_config, config)
        coordinator = VTokenCoordinatorMixin.adopt(
            self.kv_cache_manager.coordinator, group, self._num_withheld, self._waits
        )
        self._manager = manager = coordinator.managed
        others = other_groups(coordinator, group, kv_cache_config, config, self.requests)
        settings = read_settings(config.additional_config or {})
        log.info("vToken: %s", selftest.run())
        geometry = _geometry(config, kv_cache_config, group)
        shape = EngineShape(
            geometry,
            report_lag_steps=config.max_concurrent_batches - 1,
            max_drafts=config.num_speculative_tokens,
            lookahead=config.num_lookahead_tokens,
            max_chunk_tokens=max_chunk_tokens(config.scheduler_config),
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            borrows_blocks=config.device_config.device_type == "cpu",
        )
        self.vtoken = Runtime(
            shape,
            VLLMBlockStore(manager, others),
            initial_config(settings, geometry),
            strict=settings.strict,
            check_every_step=settings.check_every_step,
            vocabulary=VLLMVocabulary(config.model_config, self.requests),
            other_groups=others,
            num_sampled=lambda request_id: self.requests[request_id].num_output_tokens,
        )
        self._chats = VLLMChats(config.model_config, settings.chat_template)
        manager.runtime = self.vtoken
        self._counts = self.vtoken.counters.serving
        _require(self.vtoken)
        self._facts = EngineFacts(
            epoch=uuid.uuid4().hex[:12],
            vtoken_version=vtoken.__version__,
            vllm_version=vllm.__version__,
            model=str(config.model_config.served_model_name or config.model_config.model),
            device=str(config.device_config.device_type),
            group_index=group.index,
            block_bytes=_block_bytes(config, kv_cache_config),
        )
        self._publisher = Publisher(self.vtoken.events)
        self.vtoken_controller = Controller(
            Reporter(self.vtoken, self._facts, manager.hashed, SchedulerQueue(self)),
            self._publisher.endpoint,
            end_request=self._end_request,
        )
        self.vtoken_controller.note_started()
        self._resuming: list[Any] = []  # swapped requests that vLLM may resume in this step
        self._by_priority = config.scheduler_config.policy == "priority"

    # ------------------------------------------------------------ the step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.vtoken_controller.before_step()
        self.vtoken.begin_step(*self._upcoming(throttle_prefills))
        output = super().schedule(throttle_prefills)
        self._end_resumption()
        plan = self.vtoken.commit_step(self._scheduled(output.num_scheduled_tokens))
        if self.vtoken.concerns_worker(plan):
            output.vtoken = plan
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        plan = getattr(scheduler_output, "vtoken", None)
        if plan is not None:
            report = getattr(model_runner_output, "vtoken", None)
            self.vtoken.finish_step(report, plan.step)
        drafts = num_drafts(scheduler_output)
        if drafts:  # before vLLM ends requests
            self._take_back(drafts, num_rejected(drafts, model_runner_output))
        result = super().update_from_output(scheduler_output, model_runner_output)
        self._check_lengths(drafts)
        self._note_outputs(result)
        num_scheduled = scheduler_output.num_scheduled_tokens
        num_more = scheduler_output.total_num_scheduled_tokens - len(num_scheduled)
        if step_ms := self._facts.step_times.newest_ms:
            self.vtoken.prices.note_step(1e3 * step_ms, num_more - sum(drafts.values()))
        return result

    def _take_back(self, drafts: Mapping[str, int], rejected: Mapping[str, int]) -> None:
        """Count the `drafts` of a step, and take back those that were rejected."""
        num_proposed = sum(drafts[name] for name in rejected)
        self.vtoken.drafts.add(num_proposed, sum(rejected.values()))
        self.vtoken.truncate(rejected)

    def _note_outputs(self, outputs: dict[int, Any]) -> None:
        """Count what a step has sampled; vLLM keys `outputs` by client."""
        now = time.monotonic()
        served: list[str] = []
        num_tokens = 0
        for client in outputs.values():
            for output in client.outputs:
                if output.new_token_ids:
                    served.append(output.request_id)
                    num_tokens += len(output.new_token_ids)
        self.vtoken.sampled(served, num_tokens, now)
        self._note_step(now)

    def _check_lengths(self, request_ids: Iterable[str]) -> None:
        requests, held = self.requests, self.vtoken.tables
        counts = {i: requests[i].num_computed_tokens for i in request_ids if i in held}
        self.vtoken.check_lengths(counts)

    def _upcoming(
        self, throttle_prefills: bool
    ) -> tuple[list[str], list[tuple[str, int]], list[tuple[str, int]]]:
        """Requests that decode next; requests in prefill, with the bound of their next chunk; those
        that decode drafts too, with the number of their tokens.
        """
        if self.vtoken.idle:
            return [], [], []  # nothing can be due
        ready, prefilling, drafting = [], [], []
        holds_prefills = self._holds_prefills(throttle_prefills)
        requests, chunk = self.vtoken.requests.held, self.vtoken.shape.max_chunk_tokens
        for request in self._may_be_due():
            state = requests.get(request.request_id)
            num_tokens = request.num_tokens + request.num_output_placeholders
            num_left = num_tokens - request.num_computed_tokens
            if state is None or num_left < 1:
                continue
            if request.num_computed_tokens < state.prefill_end:
                if not holds_prefills:
                    prefilling.append((request.request_id, min(num_left, chunk)))
            elif num_left == 1:
                ready.append(request.request_id)
                if request.spec_token_ids:
                    drafting.append((request.request_id, 1 + len(request.spec_token_ids)))
        return ready, prefilling, drafting

    def _holds_prefills(self, throttle_prefills: bool) -> bool:
        """Whether vLLM computes no chunk of a prompt in this step, so that other requests decode
        undisturbed (`--prefill-schedule-interval`). It decides so inside its own `schedule`.
        """
        interval = getattr(self, "local_prefill_interval", 1)  # vLLM 0.32 only asks its engine
        if interval > 1:
            num_steps = self.num_executed_steps + 1 - self.last_prefill_step
            throttle_prefills |= num_steps < interval
        return (
            throttle_prefills
            and not self.prefill_capacity_bound
            and any(not request.is_prefill_chunk for request in self.running)
        )

    def _may_be_due(self) -> list[Any]:
        running: list[Any] = self.running
        return running

    def _scheduled(self, num_scheduled: Mapping[str, int]) -> Scheduled:
        """The requests of a step; `num_scheduled`: how many tokens of each it computes."""
        held, known = self._manager.req_to_blocks, self.vtoken.tables.rows
        request_ids = list(num_scheduled)
        requests = [self.requests[request_id] for request_id in request_ids]
        new = {}
        for request in requests:
            name = request.request_id
            if name not in known:
                if request.num_computed_tokens == num_scheduled[name]:
                    self.vtoken.swapper.give_up(name, "the engine computes it again")
                new[name] = HeldRequest(
                    name, request.num_prompt_tokens, request.num_tokens, _prompt_seed(request)
                )
                self._count_hits(request, request.num_computed_tokens - num_scheduled[name])
        return Scheduled(
            request_ids,
            [request.num_computed_tokens for request in requests],
            [len(held[request_id]) for request_id in request_ids],
            new,
        )

    def _count_hits(self, request: Any, num_cached_tokens: int) -> None:
        """Count what a request that starts looked up in the prefix cache, as vLLM does."""
        looks = self.kv_cache_manager.enable_caching and not request.skip_reading_prefix_cache
        announced = self.vtoken.requests.announced.get(request.request_id)
        is_check = announced is not None and announced.is_check
        if looks and request.num_preemptions == 0 and not is_check:
            self._counts.prefix_query_tokens += request.num_tokens
            self._counts.prefix_hit_tokens += num_cached_tokens

    # ------------------------------------------------------------ a request's arrival and end

    def add_request(self, request: Any) -> None:
        self._announce(request)
        super().add_request(request)

    def _announce(self, request: Any) -> None:
        rules = request_rules(getattr(request.sampling_params, "extra_args", None))
        if request.resumable or request.request_id in self.requests:
            # See `VTokenScheduler`.
            rules = RequestRules(policy=make_policy("none", {}), session=True)
        self.vtoken.announce(
            request.request_id,
            rules,
            num_prompt_tokens=request.num_tokens,
            max_tokens=min(request.num_prompt_tokens + request.max_tokens, self.max_model_len),
            priority=request.priority if self._by_priority else 0,
            prompt=Prompt(
                request.num_prompt_tokens,
                partial(self._chats.parts, request.prompt_token_ids),
                is_embedded=request.prompt_embeds is not None,
                is_scored=scores_prompt(request.sampling_params),
            ),
        )

    def _free_blocks(self, request: Any) -> None:
        super()._free_blocks(request)
        self.vtoken.discard(request.request_id, request.num_output_tokens)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, whose first value is the answer's `kv_transfer_params`."""
        is_capped = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if is_capped and request.num_tokens >= self.max_model_len:
            self._counts.length_capped += request.request_id != self.vtoken.canary.request_id
        asks = self.vtoken.requests.own_rules(request.request_id).report
        params, *others = super()._free_request(request, *args, **kwargs)
        ended = self.vtoken.finished.get(request.request_id) if asks else None
        if ended is not None:
            params = (params or {}) | {"vtoken": answer_report(ended)}
        return params, *others

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; with `drop_stale_output` K and V are void, or owed to a connector."""
        settled = not kwargs.get("drop_stale_output") and self._is_settled(request)
        self.vtoken.release(request.request_id, preempted=True, settled=settled)
        super()._preempt_request(request, *args, **kwargs)

    def _is_settled(self, request: Any) -> bool:
        """Whether all tokens that count as computed are, once the steps in flight have run, and one
        token follows them.
        """
        num_known = request.num_tokens + request.num_output_placeholders
        num_drafts = self.num_spec_tokens and request.num_in_flight_tokens
        return not (
            request.resumable
            or request.has_encoder_inputs
            or self.aux_output_connector is not None  # it forgets what it kept of the request
            or request.num_stale_output_tokens
            or num_drafts
            or num_known - request.num_computed_tokens > 1
        )

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """As vLLM's, which asks before it looks a waiting request up in the prefix cache: that goes
        on from the tokens that are computed already, if there are any.
        """
        if not super()._handle_blocked_waiting_request(request):
            return False
        if request.num_stale_output_tokens:
            return True  # vLLM skips it
        swapper, name = self.vtoken.swapper, request.request_id
        num_computed = swapper.num_computed(name)
        if num_computed and request.num_tokens != num_computed + 1:
            swapper.give_up(name, "its tokens are others")
        elif num_computed:
            request.num_computed_tokens = num_computed
            self._resuming.append(request)
        return num_computed is not None

    def _end_resumption(self) -> None:
        """Let swapped requests that did not resume in this step count no token as computed."""
        for request in self._resuming:
            if request.status == RequestStatus.PREEMPTED:
                request.num_computed_tokens = 0
        self._resuming.clear()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's, which may be asked because K and V do not fit the model's weights any more."""
        reset: bool = super().reset_prefix_cache(*args, **kwargs)
        if reset:
            self.vtoken.swapper.give_up_all("the prefix cache was reset")
        return reset

    def _waits(self, request_id: str) -> bool:
        return bool(self.requests[request_id].status == RequestStatus.WAITING)

    def _end_request(self, request_id: str) -> None:
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        self._facts.step_times.leave_out()
        reporter = self.vtoken_controller.reporter
        reporter.scheduling.changed(SCHEDULING[pause_state], time.monotonic())
        self._count_requests()
        self._publisher.publish(self.vtoken_controller.frame, force=True)

    def shutdown(self) -> None:
        self._publisher.close()
        super().shutdown()

    # ------------------------------------------------------------ commands and telemetry

    def vtoken_command(self, payload: bytes) -> bytes:
        """Handle one command of the API, in the engine's thread, between two steps.

        A change is published at once. Every change adds an event.
        """
        self._count_requests()
        events = self.vtoken.events
        before = events.last_seq
        reply = self.vtoken_controller.handle_bytes(payload)
        self._publisher.publish(self.vtoken_controller.frame, force=events.last_seq != before)
        return reply

    def vtoken_weights_changed(self, call: str, num_dropped: int = 0) -> None:
        """`call` to the workers may change the model's weights, between two steps.

        `num_dropped`: the outputs of before that nobody checks because of it.
        """
        events = self.vtoken.events
        before = events.last_seq
        self.vtoken_controller.note_weights(call, num_dropped)
        self._publisher.publish(self.vtoken_controller.frame, force=events.last_seq != before)

    def _note_step(self, now: float) -> None:
        idle = not super().get_num_unfinished_requests()
        self._facts.step_times.ended(now, idle=idle)
        self._count_requests()
        self._publisher.publish(self.vtoken_controller.frame, force=idle)

    def _count_requests(self) -> None:
        self._facts.running, self._facts.waiting = self.get_request_counts()
        any_idle = self.num_waiting_for_streaming_input
        known = self.requests.values() if any_idle else ()
        idle = frozenset(request.request_id for request in known if is_idle(request))
        self.vtoken.requests.idle = idle
        self._facts.waiting -= len(idle)
        self._facts.withheld_blocks = self._num_withheld()

    def _num_withheld(self) -> int:
        """Blocks that must stay free when a waiting request starts (`--watermark`)."""
        if not self.running:
            return 0
        return int(self.kv_cache_manager.watermark_blocks)


def scores_prompt(sampling_params: Any) -> bool:
    """Whether a request asks for log-probabilities of its prompt: of the likeliest tokens, or of
    tokens that it names.
    """
    names = ("prompt_logprobs", "prompt_logprob_token_ids")
    return any(getattr(sampling_params, name, None) is not None for name in names)


def max_chunk_tokens(scheduling: Any) -> int:
    """The longest chunk of a prompt while other requests run or wait, from vLLM's configuration."""
    budget: int = scheduling.max_num_batched_tokens
    threshold: int = scheduling.long_prefill_token_threshold
    if threshold and scheduling.long_prefill_token_threshold_adaptive:
        return max(threshold, budget // 2)  # vLLM shares the budget between at least two requests
    return threshold or budget


def _require(runtime: Runtime) -> None:
    """Raises UnsupportedError when this engine cannot serve its initial configuration."""
    try:
        runtime.ranking.require_all(runtime.config)
    except RefusedError as error:
        raise UnsupportedError(f"initial configuration: {error.detail}") from None


def _prompt_seed(request: Any) -> int:
    """A seed that depends only on the prompt, so that random eviction is reproducible."""
    tokens = request.prompt_token_ids
    return 0 if tokens is None else zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes())


class VTokenScheduler(CanarySchedulerMixin, VTokenSchedulerMixin):
    """vLLM's scheduler with token-level virtualization.

    A streaming-input session evicts nothing. vLLM ends a turn by removing sampled tokens and starts
    the next turn as a new request over the same blocks, which must have a positional layout.
    """


class VTokenAsyncScheduler(VTokenScheduler, AsyncScheduler):
    """The same with asynchronous scheduling: step n + 1 is planned while step n runs."""


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler for this configuration; the value of `scheduler_cls`.

    vLLM decides on asynchronous scheduling (flag, platform, executor) only after it has parsed its
    arguments, so the class is chosen here.
    """
    scheduler_class = VTokenScheduler
    if vllm_config.scheduler_config.async_scheduling:
        scheduler_class = VTokenAsyncScheduler
    with startup_error.kept():
        scheduler: Scheduler = scheduler_class(vllm_config, *args, **kwargs)
    return scheduler
