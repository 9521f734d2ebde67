"""The quality canary on the real engine: metrics, scheduling, and outputs that stay inside.

The reference is one Hugging Face forward over prompt and output, without eviction.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.latency import num_tracked
from tests.support.observe import core_of, runtime_of, scheduler_of
from tests.support.stepping import add, step
from vtoken.vllm.engine.canary import checks as module
from vtoken.wire import Guard
from vtoken.wire.commands import Command, PatchConfig
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((200, 90, 150))]
NUM_NEW = 60
ALWAYS = {"share": 1.0, "control_share": 1.0}


def args(policy: str = "streaming_llm", **config: Any) -> dict[str, Any]:
    config = {
        "policy": {"name": policy},
        "budget_tokens": 64,
        "evict_when": "always",
        "interval_tokens": 8,
        "canary": ALWAYS,
        **config,
    }
    return engine_args(config, check_every_step=True)


def finish_checks(llm: Any) -> Any:
    """Step until no check is left; the canary's document."""
    while scheduler_of(llm).has_unfinished_requests():
        assert llm.llm_engine.step() == []
    return scheduler_of(llm).vtoken_controller.reporter.status().canary


def full_logprobs(hf_model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probabilities [n, vocabulary] at the positions of `output`, without eviction."""
    with torch.no_grad():
        logits = hf_model(torch.tensor([prompt + output])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 : -1]


def test_without_eviction_every_token_agrees_and_nothing_is_lost(engine: Any, greedy: Any) -> None:
    with engine(**args("none")) as llm:
        greedy(llm, PROMPTS, NUM_NEW)
        found = finish_checks(llm)
    assert (found.count, found.checked, found.dropped) == (0, 3, 0)
    control = found.control
    assert (control.count, control.greedy_count, control.tokens) == (3, 3, 3 * NUM_NEW)
    assert control.agreement == 1.0
    assert abs(control.logprob_lost) < 1e-5


@pytest.mark.parametrize("overlap", [False, True])
def test_metrics_of_an_evicting_run_equal_an_independent_recomputation(
    engine: Any, hf_model: Any, overlap: bool
) -> None:
    from vllm import SamplingParams

    with async_scheduling() if overlap else nullcontext(), engine(**args()) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
        inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [r.outputs[0] for r in llm.generate(inputs, params, use_tqdm=False)]
        found = finish_checks(llm)
        assert runtime_of(llm).counters.tokens.evicted > 0
        again = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        unasked = [r.outputs[0] for r in llm.generate(inputs, again, use_tqdm=False)]
        twice = finish_checks(llm)
    agreed, own, full = 0, 0.0, 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = list(output.token_ids)
        expected = full_logprobs(hf_model, prompt, ids)
        agreed += int((expected.argmax(dim=-1) == torch.tensor(ids)).sum())
        full += float(expected.gather(1, torch.tensor(ids)[:, None]).sum())
        own += sum(step[token].logprob for step, token in zip(output.logprobs, ids, strict=True))
    num = NUM_NEW * len(PROMPTS)
    assert 0 < agreed < num  # otherwise the comparison proves nothing
    assert found.agreement == pytest.approx(agreed / num)
    assert found.logprob == pytest.approx(full / num, abs=1e-4)
    assert found.logprob_lost == pytest.approx((own - full) / num, abs=1e-4)
    (group,) = found.groups
    assert (group.policy, group.revision, group.count) == ("streaming_llm", 1, 3)
    # The same for requests without log-probabilities: the engine computes its own.
    assert [o.token_ids for o in unasked] == [o.token_ids for o in outputs]
    assert all(o.logprobs is None for o in unasked)
    assert twice.count == 6
    assert twice.logprob_lost == pytest.approx(found.logprob_lost, abs=1e-5)


def test_evicting_always_is_reverted_when_the_real_outputs_agree_too_little(
    engine: Any, greedy: Any
) -> None:
    with engine(**args(evict_when="pressure")) as llm:
        controller, counters = scheduler_of(llm).vtoken_controller, runtime_of(llm).counters
        unharmed = greedy(llm, PROMPTS, NUM_NEW)
        assert finish_checks(llm).control.agreement == 1.0
        assert counters.tokens.evicted == 0
        guard = Guard(metric="canary_agreement{group=evicting}", below=0.99, min_count=3)
        call = PatchConfig(patch={"evict_when": "always"}, guards=[guard])
        assert controller.handle(Command(call=call)).problem is None
        harmed = greedy(llm, PROMPTS, NUM_NEW)
        assert harmed != unharmed
        finish_checks(llm)
        greedy(llm, PROMPTS[1:2], 4)  # a guard is evaluated before a step
        assert runtime_of(llm).config.evict_when == "pressure"
        event = runtime_of(llm).events.page(0, 10_000, "config").events[-1]
        assert (event.data["actor"], event.data["reverted"]) == ("guard", 2)
        assert event.data["reason"].endswith("< 0.99 over 3 canaries")
        evicted = counters.tokens.evicted
        assert greedy(llm, PROMPTS, NUM_NEW) == unharmed
        assert counters.tokens.evicted == evicted > 0


def run_until_checking(llm: Any) -> Any:
    """Step until a check runs; return its request."""
    checks = scheduler_of(llm).vtoken_canary
    for _ in range(500):
        llm.llm_engine.step()
        if checks.request is not None and checks.request.num_computed_tokens:
            return checks.request
    raise AssertionError("no check began")


def test_a_check_computes_nothing_that_the_prefix_cache_holds_and_adds_nothing(
    engine: Any, greedy: Any
) -> None:
    with engine(enable_prefix_caching=True, **args(interval_tokens=0)) as llm:
        scheduler, scheduled = scheduler_of(llm), []
        greedy(llm, PROMPTS[:1], NUM_NEW)
        cached = dict(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)
        update = scheduler.update_from_output

        def note(output: Any, result: Any) -> Any:
            scheduled.append(dict(output.num_scheduled_tokens))
            return update(output, result)

        scheduler.update_from_output = note
        found = finish_checks(llm)
        after = dict(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)
    assert found.checked == 1
    # 200 prompt tokens are six full blocks of 32 and eight tokens more.
    assert sum(sum(step.values()) for step in scheduled) == 200 % 32 + NUM_NEW
    assert all(max(step.values(), default=0) <= module.CHUNK_TOKENS for step in scheduled)
    assert set(after) <= set(cached)


def test_a_check_leaves_no_trace_but_its_metrics(engine: Any, greedy: Any) -> None:
    def counted(llm: Any) -> list[Any]:
        runtime, counts = runtime_of(llm), scheduler_of(llm).get_request_counts()
        counters = runtime.counters
        return [
            counters.requests.finished,
            counters.tokens.generated,
            counters.requests.preempted,
            num_tracked(runtime.latency),
            runtime.latency.document(time.monotonic()).ttft.count,
            counts,
        ]

    with engine(**args()) as llm:
        greedy(llm, PROMPTS, NUM_NEW)
        before = counted(llm)
        core = core_of(llm)
        while scheduler_of(llm).has_unfinished_requests():
            outputs, _ = core.step_fn()
            assert not any(part.outputs or part.finished_requests for part in outputs.values())
        assert counted(llm) == before
        assert scheduler_of(llm).requests == {}
        runtime = runtime_of(llm)
        requests = runtime.requests
        assert (len(runtime.tables), requests.announced, requests.own_policies) == (0, {}, {})
        assert runtime.canary.document().checked == 3
        assert len(scheduler_of(llm).vtoken_canary.samples) == 0


def test_sampled_requests_have_a_loss_but_no_agreement(engine: Any, greedy: Any) -> None:
    with engine(**args()) as llm:
        greedy(llm, PROMPTS, NUM_NEW, min_tokens=1)  # no token may end it: not the first choice
        add(llm, "warm", PROMPTS[0], NUM_NEW, temperature=1.0, seed=1)
        step(llm)
        found = finish_checks(llm)
    assert (found.count, found.greedy_count, found.agreement) == (4, 0, None)
    assert found.logprob_lost is not None


def test_only_the_share_is_checked_and_only_while_it_is_on(engine: Any, greedy: Any) -> None:
    with engine(**args(canary={"share": 0.0})) as llm:
        greedy(llm, PROMPTS, NUM_NEW)
        assert scheduler_of(llm).vtoken_canary.num_unfinished == 0
        assert finish_checks(llm) is None
        controller = scheduler_of(llm).vtoken_controller
        controller.patch_config({"canary": {"share": 1.0, "control_share": 0.0}})
        greedy(llm, [PROMPTS[1][:20]], 4)  # below its budget: of the control group
        greedy(llm, PROMPTS[:1], NUM_NEW)
        found = finish_checks(llm)
        assert (found.count, found.control.count, found.groups[0].revision) == (1, 0, 2)


def test_a_request_that_saw_two_revisions_is_not_checked(engine: Any) -> None:
    with engine(**args()) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        step(llm, times=10)
        scheduler_of(llm).vtoken_controller.patch_config({"theta_f": 0.5})
        step(llm)
        found = finish_checks(llm)
    assert (found.checked, found.skipped) == (0, {"revision changed": 1})


def stop_string(llm: Any, output: list[int]) -> str:
    """A text that the output contains for the first time behind its first third."""
    text = llm.get_tokenizer().decode(output)
    for start in range(len(text) // 3, len(text) - 3):
        if text.find(text[start : start + 4]) == start:
            return str(text[start : start + 4])
    raise AssertionError("the output repeats itself from its start")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_ends_on_a_stop_string_is_checked(
    engine: Any, hf_model: Any, greedy: Any, overlap: bool
) -> None:
    from vllm import SamplingParams

    with async_scheduling() if overlap else nullcontext(), engine(**args()) as llm:
        scheduler_of(llm).vtoken_controller.patch_config({"canary": {"share": 0.0}})
        (whole,) = greedy(llm, PROMPTS[:1], NUM_NEW)
        scheduler_of(llm).vtoken_controller.patch_config({"canary": {"share": 1.0}})
        stop = stop_string(llm, whole)
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, stop=[stop])
        inputs = {"prompt_token_ids": PROMPTS[0]}
        (ended,) = llm.generate(inputs, params, use_tqdm=False)
        output = ended.outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        found = finish_checks(llm)
        num = len(output.token_ids)
        assert output.token_ids == whole[:num]
        assert len(scheduler_of(llm).vtoken_canary.samples) == 0
    assert (found.checked, found.dropped, found.skipped) == (1, 0, {})
    assert (found.count, found.tokens) == (1, num)
    expected = full_logprobs(hf_model, PROMPTS[0], whole[:num])
    agreed = expected.argmax(dim=-1) == torch.tensor(whole[:num])
    full = expected.gather(1, torch.tensor(whole[:num])[:, None]).mean()
    assert found.agreement == pytest.approx(float(agreed.float().mean()))
    assert found.logprob == pytest.approx(float(full), abs=1e-4)
    assert found.logprob_lost is not None


def test_an_aborted_request_is_counted_as_skipped(engine: Any) -> None:
    with engine(**args()) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        step(llm, times=10)
        add(llm, "b", PROMPTS[1], NUM_NEW, stop=["never"])  # no token yet
        llm.llm_engine.abort_request(["a", "b"])
        found = finish_checks(llm)
        assert scheduler_of(llm).requests == {}
    assert (found.checked, found.dropped, found.skipped) == (0, 0, {"aborted": 2})


def test_no_check_outlives_the_end_of_all_requests(engine: Any) -> None:
    from vllm.v1.request import RequestStatus

    with engine(**args()) as llm:
        scheduler = scheduler_of(llm)
        add(llm, "a", PROMPTS[0], NUM_NEW, stop=["never"])
        step(llm, times=10)
        (ended,) = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        assert ended.request_id.startswith("a")
        assert (scheduler.requests, scheduler.vtoken_canary.num_unfinished) == ({}, 0)
        assert runtime_of(llm).canary.document().dropped == 1


def test_requests_that_cannot_be_checked_are_not_sampled(engine: Any) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

    def request(number: int, params: Any = None, **fields: Any) -> Any:
        return Request(f"r{number}", [1, 2, 3], params or SamplingParams(), None, **fields)

    structured = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]"))
    with engine(**args()) as llm:
        samples = scheduler_of(llm).vtoken_canary.samples
        for each in (
            request(0, structured),
            request(1, lora_request=LoRARequest("adapter", 1, "/adapter")),
            request(2, resumable=True),
            request(3, prompt_embeds=torch.zeros(3, 8)),
        ):
            params = each.sampling_params
            samples.arrived(each)
            assert each.sampling_params is params
        assert len(samples) == 0
        samples.arrived(request(4))
        assert len(samples) == 1
        assert runtime_of(llm).canary.document().skipped == {
            "LoRA": 1,
            "prompt embeddings": 1,
            "session": 1,
            "structured output": 1,
        }


def test_a_request_is_admitted_in_the_step_in_which_it_comes_and_the_check_pauses(
    engine: Any,
) -> None:
    with engine(enable_prefix_caching=False, **args()) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        check = run_until_checking(llm)
        done = check.num_computed_tokens
        add(llm, "b", PROMPTS[1], NUM_NEW)
        llm.llm_engine.step()
        # The other request's entire prompt in one step, and no token of the check.
        (other,) = [r for r in scheduler_of(llm).running if r is not check]
        assert (other.num_computed_tokens, check.num_computed_tokens) == (len(PROMPTS[1]), done)
        llm.llm_engine.step()
        assert done < check.num_computed_tokens <= done + module.CHUNK_TOKENS
        step(llm)
        found = finish_checks(llm)
    assert (found.checked, found.dropped) == (2, 0)


def test_control_without_its_limit_a_check_computes_beside_a_prompt(
    engine: Any, monkeypatch: Any
) -> None:
    with engine(enable_prefix_caching=False, **args()) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        check = run_until_checking(llm)
        done = check.num_computed_tokens
        monkeypatch.setattr(module.Checks, "limit", lambda _, num_new_tokens: num_new_tokens)
        add(llm, "b", PROMPTS[1], NUM_NEW)
        step(llm, times=1)
        assert check.num_computed_tokens > done + module.CHUNK_TOKENS


def small_pool(num_blocks: int, **config: Any) -> dict[str, Any]:
    """An engine of `num_blocks` usable blocks whose rules keep none free."""
    return {
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": num_blocks + 1,
        "max_model_len": num_blocks * 32,
        **args("none", low_watermark_blocks=0, headroom_blocks=0, **config),
    }


@pytest.mark.parametrize(
    ("policy", "goes_last", "lowest", "preempted"),
    [
        pytest.param("fcfs", True, module.LOWEST_PRIORITY, "check", id="last"),
        pytest.param("fcfs", False, module.LOWEST_PRIORITY, "request", id="last, control"),
        pytest.param("priority", False, module.LOWEST_PRIORITY, "check", id="priority"),
        pytest.param("priority", False, 2**63 - 2, "request", id="priority, control"),
    ],
)
def test_vllm_preempts_a_check_before_any_request(
    engine: Any, monkeypatch: Any, policy: str, goes_last: bool, lowest: int, preempted: str
) -> None:
    """Of a check and a younger request of the last rank that an API takes, which needs a block."""
    monkeypatch.setattr(module, "LOWEST_PRIORITY", lowest)
    with engine(scheduling_policy=policy, **small_pool(11)) as llm:
        scheduler, counters = scheduler_of(llm), runtime_of(llm).counters
        add(llm, "a", PROMPTS[0], NUM_NEW)
        check = run_until_checking(llm)
        assert check.num_computed_tokens == module.CHUNK_TOKENS  # two blocks
        # It stays: only vLLM's own rules end it.
        monkeypatch.setattr(module.Checks, "limit", lambda *_: 0)
        monkeypatch.setattr(module.Checks, "_has_room", lambda *_: True)
        if not goes_last:
            monkeypatch.setattr(module.Checks, "_go_last", lambda _: None)
        add(llm, "b", reference.random_prompt(260, 7), 60, priority=2**63 - 1)  # 9 blocks, then 10
        step(llm, times=40)
        found = "request" if counters.requests.preempted else "check"
        assert (found, check.request_id in scheduler.requests) == (
            preempted,
            preempted == "request",
        )
        scheduler.vtoken_canary.drop_all()


def test_no_request_gives_or_moves_for_a_check(engine: Any, monkeypatch: Any) -> None:
    with engine(**args()) as llm:
        scheduler = scheduler_of(llm)
        add(llm, "a", PROMPTS[0], NUM_NEW)
        add(llm, "b", PROMPTS[1], 2 * NUM_NEW)
        check = run_until_checking(llm)
        (other,) = [r for r in scheduler.running if r is not check]
        assert scheduler._upcoming(throttle_prefills=False) == ([other.request_id], [], [])
        with monkeypatch.context() as patched:  # control: as any other request it would count
            patched.setattr(scheduler.vtoken_canary, "request", None)
            ((request_id, _),) = scheduler._upcoming(throttle_prefills=False)[1]
        assert request_id == check.request_id


def test_a_check_that_gets_no_blocks_is_dropped_and_asks_for_none(
    engine: Any, monkeypatch: Any
) -> None:
    with engine(**small_pool(11)) as llm:
        runtime, checks = runtime_of(llm), scheduler_of(llm).vtoken_canary
        monkeypatch.setattr(module.Checks, "_has_room", lambda *_: False)
        add(llm, "a", PROMPTS[0], 4)
        add(llm, "b", PROMPTS[1], 250)
        while runtime.store.num_free_blocks() != 2:
            llm.llm_engine.step()
        assert (checks.num_unfinished, checks.request) == (1, None)
        asking, record = [], runtime.admission.record_demand

        def note(request_id: str, *demand: Any, **more: Any) -> None:
            asking.append(request_id)
            record(request_id, *demand, **more)

        monkeypatch.setattr(runtime.admission, "record_demand", note)
        monkeypatch.setattr(module.Checks, "_has_room", lambda *_: True)
        llm.llm_engine.step()
        assert (checks.num_unfinished, runtime.canary.document().dropped) == (0, 1)
        assert asking == []
        (other,) = scheduler_of(llm).running
        add(llm, "c", PROMPTS[0], 4)  # control: a request that gets none does ask
        llm.llm_engine.step()
        assert len(asking) > 0
        assert other.num_preemptions == 0
        scheduler_of(llm).finish_requests(None, other.status.FINISHED_ABORTED)


def test_a_check_takes_no_place_from_a_request(engine: Any) -> None:
    with engine(max_num_active_seqs=1, enable_prefix_caching=False, **args()) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        check = run_until_checking(llm)
        add(llm, "b", PROMPTS[1], NUM_NEW)
        llm.llm_engine.step()
        (request,) = scheduler_of(llm).running
        assert request is not check
        step(llm)
        assert finish_checks(llm).dropped == 1


def test_a_check_that_is_ended_from_outside_is_dropped(engine: Any) -> None:
    from vllm.v1.request import RequestStatus

    with engine(**args()) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        check = run_until_checking(llm)
        scheduler_of(llm).finish_requests(check.request_id, RequestStatus.FINISHED_ABORTED)
        assert finish_checks(llm).dropped == 1


def test_without_chunked_prefill_no_check_runs_in_chunks(engine: Any, greedy: Any) -> None:
    whole = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    with engine(**whole, **args()) as llm:
        greedy(llm, [PROMPTS[0], PROMPTS[1][:20]], 10)
        found = finish_checks(llm)
    assert (found.checked, found.dropped) == (1, 1)


def test_a_check_is_dropped_when_a_request_needs_its_blocks(engine: Any) -> None:
    blocks = 24
    options = {
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": blocks,
        "max_model_len": (blocks - 1) * 32,
    }
    with engine(**options, **args(low_watermark_blocks=0, headroom_blocks=0)) as llm:
        add(llm, "a", PROMPTS[0], NUM_NEW)
        check = run_until_checking(llm)
        big = reference.random_prompt((blocks - 2) * 32, 7)
        add(llm, "b", big, 4)
        llm.llm_engine.step()
        assert scheduler_of(llm).get_request_counts() == (1, 0)  # admitted at once
        assert check.request_id not in scheduler_of(llm).requests
        step(llm)
        found = finish_checks(llm)
        assert runtime_of(llm).counters.requests.preempted == 0
    assert found.dropped >= 1


def test_a_check_does_not_keep_the_prefix_cache_of_an_idle_engine_from_a_reset(engine: Any) -> None:
    """Its blocks are held, but no request of a user is left."""
    with engine(enable_prefix_caching=True, **args()) as llm:
        scheduler = scheduler_of(llm)
        for n, prompt in enumerate(PROMPTS):
            add(llm, f"done-{n}", prompt, NUM_NEW)
        run_until_checking(llm)
        assert scheduler.get_request_counts() == (0, 0)
        assert scheduler.vtoken_canary.num_unfinished == 3
        assert scheduler.reset_prefix_cache()
        assert scheduler.vtoken_canary.num_unfinished == 0
        found = finish_checks(llm)
        assert (found.checked, found.dropped) == (0, 3)
        block_pool = scheduler.kv_cache_manager.block_pool
        assert block_pool.get_num_free_blocks() == block_pool.num_gpu_blocks - 1


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_beside_a_request_drops_checks_only_if_it_preempts_the_request(
    engine: Any, running: bool
) -> None:
    with engine(enable_prefix_caching=True, **args()) as llm:
        scheduler = scheduler_of(llm)
        add(llm, "done", PROMPTS[0], NUM_NEW)
        run_until_checking(llm)
        add(llm, "goes on", PROMPTS[1], NUM_NEW)
        llm.llm_engine.step()  # the check pauses
        assert scheduler.get_request_counts() == (1, 0)
        assert scheduler.vtoken_canary.num_unfinished == 1
        assert scheduler.reset_prefix_cache(reset_running_requests=running) == running
        assert scheduler.vtoken_canary.num_unfinished == (0 if running else 1)
        while scheduler.has_unfinished_requests():
            llm.llm_engine.step()
        assert scheduler.vtoken_controller.reporter.status().canary.dropped == running


def test_a_pause_aborts_checks_and_none_begins(engine: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState

    with engine(enable_prefix_caching=False, **args()) as llm:
        scheduler = scheduler_of(llm)
        add(llm, "a", PROMPTS[0], NUM_NEW)
        add(llm, "b", PROMPTS[1], NUM_NEW + 1)
        run_until_checking(llm)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        while scheduler.has_unfinished_requests():
            llm.llm_engine.step()
        assert (scheduler.requests, scheduler.vtoken_canary.num_unfinished) == ({}, 0)
        assert runtime_of(llm).canary.document().dropped == 2
        scheduler.set_pause_state(PauseState.UNPAUSED)
        add(llm, "c", PROMPTS[2], NUM_NEW)
        step(llm)
        assert finish_checks(llm).checked == 1


def test_a_check_without_a_result_is_an_event_and_stops_nothing(
    engine: Any, greedy: Any, monkeypatch: Any
) -> None:
    def nothing(output: Any, finished: Any) -> Any:
        raise ValueError("the prompt log-probabilities are of different tokens")

    with engine(**args()) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(module, "prompt_logprobs", nothing)
            greedy(llm, PROMPTS[:1], NUM_NEW)
            finish_checks(llm)
        greedy(llm, PROMPTS[:1], NUM_NEW)
        found = finish_checks(llm)
        (event,) = runtime_of(llm).events.page(0, 100, "canary").events
    assert (found.failed, found.checked) == (1, 1)
    assert event.data == {"reason": "the prompt log-probabilities are of different tokens"}


def halve_norms(worker: Any) -> None:
    """Other weights in place; linear layers of the CPU build keep a packed copy of theirs."""
    for name, weight in worker.get_model().named_parameters():
        if "norm" in name:
            weight.data.mul_(0.5)


@pytest.mark.parametrize(
    ("policy", "told"), [("none", True), ("streaming_llm", True), ("none", False)]
)
def test_no_output_is_checked_with_weights_that_changed_after_it(
    engine: Any, monkeypatch: pytest.MonkeyPatch, policy: str, told: bool
) -> None:
    """Control: a scheduler that is not told checks them all, and finds tokens that disagree."""
    with engine(**args(policy)) as llm:
        core = core_of(llm)
        if not told:
            monkeypatch.setattr(core.scheduler, "vtoken_weights_changed", lambda _: None)
        add(llm, "done", PROMPTS[0], NUM_NEW)
        run_until_checking(llm)
        add(llm, "both", PROMPTS[1], NUM_NEW)
        llm.llm_engine.step()
        assert core.scheduler.vtoken_canary.num_unfinished == 1
        add(llm, "waits", PROMPTS[2], NUM_NEW)
        core.collective_rpc("check_health")  # as monitoring does: changes no weight
        assert core.scheduler.vtoken_canary.num_unfinished == 1
        core.collective_rpc(halve_norms)
        core.collective_rpc(halve_norms)
        outputs = {}
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {o.request_id: o.outputs[0] for o in llm.llm_engine.step()}
        found = finish_checks(llm)
        events = runtime_of(llm).events.page(0, 100, "weights").events
    assert outputs["both"].logprobs is None  # only the canary asked for them
    if not told:
        assert (found.checked, found.skipped, events) == (3, {}, [])
        assert found.control.agreement < 1.0
        return
    assert (found.checked, found.dropped, found.skipped) == (1, 1, {"weights changed": 1})
    if policy == "none":
        assert found.control.agreement == 1.0
    (event,) = events  # of both calls
    assert event.data == {"call": "halve_norms", "dropped": 2}
    assert event.summary == (
        "halve_norms may have changed the weights: 2 outputs of before are not checked"
    )
