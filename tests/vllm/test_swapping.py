"""Requests swapped instead of computed again, on the real engine: no token differs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.support import reference
from tests.support.drafting import NGRAM, SCRIPTS, use_drafts
from tests.support.engines import engine_args
from tests.support.observe import Observer, runtime_of, scheduler_of
from tests.support.parallel import patch
from tests.support.stepping import Outputs, add, step
from vtoken.vllm.cpu.host_copies import CPUHostCopies
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

NUM_NEW = 160
PROMPTS = [reference.random_prompt(100 + 17 * i, 60 + i) for i in range(6)]
POOL = {"num_gpu_blocks_override": 24, "max_model_len": 512, "max_num_batched_tokens": 512}
NONE = {"policy": {"name": "none"}}
STREAMING = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 150,
    "interval_tokens": 16,
    "evict_when": "always",
    "experiment": {"admission": "stock"},
}
H2O = STREAMING | {"policy": {"name": "h2o"}, "budget_tokens": 120}
POLICIES = {"none": NONE, "streaming_llm": STREAMING, "h2o": H2O}


def args(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"park_bytes": 64 << 20, "verify_ratio": 1.0, **config}
    return POOL | engine_args(config, check_every_step=True) | more


@pytest.fixture(autouse=True)
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying is measured to be cheaper: what is swapped does not depend on the machine."""
    monkeypatch.setattr("vtoken.core.runtime.prices.Prices.prefill_us", 1e6)


@pytest.fixture(scope="module")
def expected(hf_model: Any) -> list[list[int]]:
    """Tokens of requests that evict nothing."""
    return [reference.generate(hf_model, p, NUM_NEW, reference.full) for p in PROMPTS]


def swapped(llm: Any) -> tuple[Outputs, str]:
    """Run `PROMPTS` until one of them waits in host memory; its id in the engine."""
    tokens: Outputs = {}
    for number, prompt in enumerate(PROMPTS):
        add(llm, f"r{number}", prompt, NUM_NEW)
    for _ in range(300):
        step(llm, tokens, times=1)
        if waiting := [*runtime_of(llm).swapper.requests]:
            return tokens, waiting[0]
    raise AssertionError("nobody was swapped")


def in_order(tokens: Outputs) -> list[list[int]]:
    return [tokens[f"r{number}"] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
def test_swapped_requests_give_the_tokens_of_requests_never_preempted(
    policy: str, overlap: bool, engine: Any, greedy: Any, hf_model: Any
) -> None:
    scheduling = async_scheduling() if overlap else nullcontext()
    pool = {"num_gpu_blocks_override": 20 if policy == "h2o" else 24}
    with scheduling, engine(**args(POLICIES[policy], **pool)) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters, logs = observer.runtime.counters, observer.logs()
        assert counters.invariants.violations == 0
        assert counters.parking.swapped_requests == counters.requests.preempted > 0
        assert observer.runtime.parking.slots.num_used == 0
    for prompt, found, log in zip(PROMPTS, tokens, logs, strict=True):
        assert found == reference.generate(
            hf_model, prompt, NUM_NEW, reference.replay(log), draft=found
        )


def test_a_request_without_drafts_in_flight_is_swapped_and_drafts_go_on(
    engine: Any, greedy: Any, expected: list[list[int]]
) -> None:
    with engine(**args(NONE, speculative_config=NGRAM)) as llm:
        use_drafts(llm, PROMPTS, expected, SCRIPTS["mixed"])
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters = runtime_of(llm).counters
        assert counters.parking.swapped_requests > 0
        assert counters.serving.accepted_draft_tokens > 0
        assert counters.invariants.violations == 0
    assert tokens == expected


def test_a_request_in_the_middle_of_its_prompt_is_computed_again(
    engine: Any, hf_model: Any
) -> None:
    prompts = [reference.random_prompt(length, length) for length in (94, 400)]
    pool = {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with engine(**args(NONE, **pool)) as llm:
        tokens: Outputs = {}
        add(llm, "r0", prompts[0], 30)
        add(llm, "r1", prompts[1], 8)
        step(llm, tokens)
        parking = runtime_of(llm).counters.parking
        assert parking.swaps_refused == {"prompt": 1}
        assert parking.copied_tokens == 0
    for number, num_new in enumerate((30, 8)):
        prompt, found = prompts[number], tokens[f"r{number}"]
        assert found == reference.generate(hf_model, prompt, num_new, reference.full, draft=found)


def test_the_least_important_request_that_preempts_itself_is_swapped(
    engine: Any, hf_model: Any
) -> None:
    """It outgrows its blocks before those behind it; vLLM 0.33 schedules these in the same step."""
    prompts = [reference.random_prompt(length, length) for length in (120, 97, 98)]
    pool = {"num_gpu_blocks_override": 13, "max_model_len": 384}
    pool |= {"scheduling_policy": "priority"}
    with engine(**args(NONE, **pool)) as llm:
        tokens: Outputs = {}
        scheduler, asked, preempted = scheduler_of(llm), [], []
        allocate, preempt = scheduler.kv_cache_manager.allocate_slots, scheduler._preempt_request

        def note_asked(request: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(request)
            return allocate(request, *args, **kwargs)

        def note_preempted(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request is asked[-1])
            preempt(request, *args, **kwargs)

        scheduler.kv_cache_manager.allocate_slots = note_asked
        scheduler._preempt_request = note_preempted
        for number, prompt in enumerate(prompts):
            add(llm, f"r{number}", prompt, 60, priority=1 - min(number, 1))
            step(llm, tokens, times=1)
        step(llm, tokens)
        counters = runtime_of(llm).counters
        assert preempted == [True]
        assert counters.parking.swapped_requests == counters.requests.preempted == 1
        assert counters.invariants.violations == 0
    for number, prompt in enumerate(prompts):
        found = tokens[f"r{number}"]
        assert found == reference.generate(hf_model, prompt, 60, reference.full, draft=found)


def test_a_swapped_request_that_is_aborted_frees_its_host_slots(engine: Any) -> None:
    with engine(**args(NONE)) as llm:
        _, name = swapped(llm)
        runtime = runtime_of(llm)
        before = runtime.parking.slots.num_used
        llm.llm_engine.abort_request([name.split("-")[0]])
        step(llm, times=1)
        assert name not in runtime.swapper.requests
        assert runtime.parking.slots.num_used < before
        step(llm)
        assert runtime.parking.slots.num_used == 0
        assert runtime.counters.invariants.violations == 0


@pytest.mark.parametrize("how", ["setting", "reset"])
def test_a_swap_that_is_given_up_is_computed_again(
    how: str, engine: Any, expected: list[list[int]]
) -> None:
    with engine(**args(NONE)) as llm:
        tokens, name = swapped(llm)
        runtime = runtime_of(llm)
        if how == "setting":
            patch(llm, park_bytes=0)
        else:
            assert scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)
        step(llm, tokens, times=1)
        assert name not in runtime.swapper.requests
        step(llm, tokens)
        assert runtime.counters.invariants.violations == 0
        (event, *_) = [e for e in runtime.events.page(None, 5000).events if e.kind == "parking"]
        assert event.data["recomputed_tokens"] > 0
    assert in_order(tokens) == expected


def test_a_host_that_refuses_memory_lets_requests_be_computed_again(
    engine: Any, greedy: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise MemoryError("no memory")

    monkeypatch.setattr(CPUHostCopies, "park", refuse)
    with engine(**args(NONE)) as llm:
        assert greedy(llm, PROMPTS, NUM_NEW) == expected
        runtime = runtime_of(llm)
        assert runtime.parking.fault == "no memory"
        assert runtime.counters.parking.swapped_requests == 1
        assert not runtime.swapper.requests
        assert runtime.counters.invariants.violations == 0


@pytest.mark.parametrize("config", [NONE, STREAMING], ids=["intact", "evicted"])
def test_others_hit_only_blocks_of_resumed_requests_that_evicted_nothing(
    config: dict[str, Any], engine: Any, expected: list[list[int]]
) -> None:
    with engine(**args(config)) as llm:
        tokens, name = swapped(llm)
        runtime, scheduler = runtime_of(llm), scheduler_of(llm)
        while name in runtime.swapper.requests:
            step(llm, tokens, times=1)
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        hashed = [block.block_hash is not None for block in manager.req_to_blocks[name]]
        assert any(hashed) == (config is NONE)
        number = int(name.split("-")[0].removeprefix("r"))
        add(llm, "twin", PROMPTS[number], NUM_NEW)
        step(llm, tokens)
        assert runtime.counters.invariants.violations == 0
    if config is NONE:
        assert tokens["twin"] == tokens[f"r{number}"] == expected[number]


def leave_out_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUHostCopies, "restore", lambda *_: 0)


def gather_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather runs a step late, when the blocks are others'."""
    park, late = CPUHostCopies.park, []

    def park_late(self: CPUHostCopies, slots: Any, hosts: Any) -> int:
        late.append((slots, hosts))
        return 0

    restore = CPUHostCopies.restore

    def restore_after(self: CPUHostCopies, hosts: Any, slots: Any) -> int:
        while late:
            park(self, *late.pop())
        return restore(self, hosts, slots)

    monkeypatch.setattr(CPUHostCopies, "park", park_late)
    monkeypatch.setattr(CPUHostCopies, "restore", restore_after)


@pytest.mark.parametrize("break_copies", [leave_out_restores, gather_late])
def test_control_broken_copies_change_tokens(
    break_copies: Any,
    engine: Any,
    greedy: Any,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine(**args(NONE | {"verify_ratio": 0.0})) as llm:
        break_copies(monkeypatch)  # after the self-test, which would notice
        assert greedy(llm, PROMPTS, NUM_NEW) != expected
        assert runtime_of(llm).counters.parking.swapped_requests > 0
