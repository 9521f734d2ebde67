"""Parked tokens on the real engine: what comes back is what gave way, and every token is exact.

After every run the reference computes all of it again: a full cache, and for each query the tokens
that were live in its step. Most tests share one engine and change its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.live_sets import LiveSets, expected_tokens, num_returns
from tests.support.observe import runtime_of, scheduler_of
from tests.support.stepping import Outputs, add, step
from vtoken.core.config.values import merge_patch
from vtoken.policies import policy_names
from vtoken.wire.commands import Command, Forget, PatchConfig, Undo
from vtoken_bench.vllm.steps_overlap import async_scheduling

pytestmark = pytest.mark.vllm

LATER = 3_600_000  # ms, longer than a test
POOL = {
    "num_gpu_blocks_override": 53,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": 128,
}
PARKS = {"park_bytes": 1 << 26, "restore_after_ms": 0}
# Three of four requests end early, so that the last one, which gave for them, is alone.
PROMPTS = [reference.random_prompt(320 + 30 * i, 60 + i) for i in range(4)]
ENDS = [230, 150, 150, 150]
FIXED = {
    "policy": {"name": "streaming_llm"},
    "budget_ratio": 0.0,
    "budget_tokens": 96,
    "evict_when": "always",
    "interval_tokens": 8,
    "headroom_blocks": 2,
    "low_watermark_blocks": 6,
}


def args(config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    config = {"verify_ratio": 1.0} | PARKS | (config or {})
    return POOL | engine_args(config, check_every_step=True) | settings


class Run:
    """Requests on an engine, their tokens and their live sets."""

    def __init__(self, llm: Any, model: Any) -> None:
        self.llm, self.model = llm, model
        self.runtime = runtime_of(llm)
        self.tokens: Outputs = {}
        self.prompts: dict[str, list[int]] = {}
        self.watch = LiveSets(scheduler_of(llm))
        counters = self.runtime.counters.parking
        self._before = {name: getattr(counters, name) for name in counters.__struct_fields__}

    def add(self, prompts: Sequence[list[int]], ends: Sequence[int], **sampling: Any) -> None:
        for prompt, num_new in zip(prompts, ends, strict=True):
            name = f"r{len(self.prompts)}"
            self.prompts[name] = prompt
            add(self.llm, name, prompt, num_new, **sampling)

    def step(self, times: int | None = None) -> None:
        step(self.llm, self.tokens, times)

    def step_until(self, reached: Any) -> None:
        for _ in range(600):
            if reached():
                return
            self.step(1)
        raise AssertionError("not reached in 600 steps")

    def id_of(self, name: str) -> str:
        (found,) = [i for i in self.runtime.requests.held if i.startswith(f"{name}-")]
        return str(found)

    def table(self, name: str) -> Any:
        return self.runtime.tables[self.id_of(name)]

    def ask(self, call: Any) -> Any:
        reply = scheduler_of(self.llm).vtoken_controller.handle(Command(call=call))
        assert reply.problem is None, reply.problem
        return reply.value

    def counted(self, name: str) -> int:
        return int(getattr(self.runtime.counters.parking, name)) - self._before[name]

    def check(self, *, returns: bool = True) -> None:
        """Finish all requests, and compute them again."""
        self.step()
        assert self.runtime.counters.invariants.violations == 0
        assert self.runtime.parking.slots.num_used == 0
        assert self.counted("restored_tokens") == self.watch.num_restored
        assert bool(self.watch.num_restored) == returns
        for name, prompt in self.prompts.items():
            stretches = self.watch.stretches[name]
            assert self.tokens[name] == expected_tokens(
                self.model, prompt, self.tokens[name], stretches
            ), name

    def returns(self, name: str) -> int:
        return num_returns(self.watch.stretches[name])


@pytest.fixture(scope="module")
def llm(engine: Any) -> Iterator[Any]:
    with engine(**args()) as it:
        yield it


SHIPPED: list[Any] = []  # the configuration of the shared engine


@pytest.fixture
def run(llm: Any, hf_model: Any) -> Iterator[Any]:
    """A run on the shared engine, with the configuration that it started with."""
    assert scheduler_of(llm).reset_prefix_cache()
    active = runtime_of(llm).active
    if not SHIPPED:
        SHIPPED.append(active.config)
    active.config = SHIPPED[0]
    it = Run(llm, hf_model)
    yield it
    for left in list(scheduler_of(llm).requests):
        llm.llm_engine.abort_request([left], internal=True)
    step(llm)
    it.watch.restore()
    active.config = SHIPPED[0]


def configure(run: Run, **patch: Any) -> None:
    active, geometry = run.runtime.active, run.runtime.geometry
    active.config = merge_patch(
        active.config, patch, num_blocks=geometry.num_blocks, num_layers=geometry.num_layers
    )


# ---------------------------------------------------------------- a burst, and then quiet

PLACEMENTS: dict[str, dict[str, Any]] = {
    "as ships": {},
    "plug": {"recycle": False, "experiment": {"planner": "plug"}},
    "pack": {"recycle": False, "experiment": {"planner": "pack"}},
    "paper's gates": {"experiment": {"round_rule": "paper"}, "theta_f": 0.0},
    "small host": {"park_bytes": 200 * 4096},
    "copies of shared blocks": {"prefix_sharing": "copy"},
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_a_burst_took_comes_back_when_it_is_over(name: str, run: Run) -> None:
    configure(run, **PLACEMENTS[name])
    run.add(PROMPTS, ENDS)
    run.step_until(lambda: run.runtime.parking.num_parked > 0)
    run.check()
    assert (run.counted("dropped_tokens") > 0) == (name == "small host")


def test_control_a_query_that_misses_what_came_back_chooses_other_tokens(run: Run) -> None:
    run.add(PROMPTS, ENDS)
    run.check()
    (stretch,) = run.watch.stretches["r0"]
    first = next(i for i, change in enumerate(stretch.changes) if change.restored)
    cut = [change._replace(restored=()) for change in stretch.changes[: first + 1]]
    stretch.changes = cut
    found = expected_tokens(run.model, PROMPTS[0], run.tokens["r0"], [stretch])
    assert found != run.tokens["r0"]


def test_with_ample_memory_nothing_is_copied_and_no_host_memory_is_taken(run: Run) -> None:
    run.add(PROMPTS[:2], [60, 60])
    run.check(returns=False)
    assert (run.watch.num_evicted, run.counted("copied_tokens")) == (0, 0)


# ---------------------------------------------------------------- a budget


def test_a_raised_budget_brings_tokens_back_up_to_it_and_an_undo_likewise(run: Run) -> None:
    configure(run, **FIXED)
    run.add(PROMPTS[:2], [160, 160])
    run.step(40)
    assert run.table("r0").num_live <= 96 + 8 + 1
    run.ask(PatchConfig(patch={"budget_tokens": 200}))
    run.step(12)
    assert 200 <= run.table("r0").num_live <= 200 + 8 + 1
    run.ask(PatchConfig(patch={"budget_tokens": 64}))
    run.step(12)
    assert run.table("r1").num_live <= 64 + 8 + 1
    run.ask(Undo())
    run.step(12)
    assert run.table("r1").num_live >= 200
    run.check()
    assert run.counted("thrashed_tokens") > 0  # gave way again soon after the return


@pytest.mark.parametrize("during", ["prefill", "both"])
def test_a_prompt_gives_and_gets_back_between_its_chunks(during: str, run: Run) -> None:
    configure(run, **FIXED, evict_during=during)
    run.add([reference.random_prompt(700, 9), PROMPTS[1]], [60, 60])
    run.step(4)
    assert run.table("r0").num_tokens < 700
    assert run.table("r0").num_parked > 0
    configure(run, budget_tokens=400)
    run.step(1)
    configure(run, budget_tokens=128)
    run.check()
    assert any(c.restored and c.num_tokens < 700 for c in run.watch.stretches["r0"][0].changes)


# ---------------------------------------------------------------- asked


def test_nothing_comes_back_before_its_time_unless_it_is_asked_for(run: Run) -> None:
    configure(run, restore_after_ms=LATER)
    run.add(PROMPTS, ENDS)
    run.step_until(lambda: len(run.tokens) and len(run.runtime.requests.held) == 1)
    run.step(5)
    assert run.watch.num_restored == 0
    assert run.runtime.restorer.waits_for() == "time"
    run.runtime.restorer.ask(run.id_of("r0"))
    run.check()


# ---------------------------------------------------------------- sharing, forgetting, preemption


def test_two_holders_of_a_shared_block_park_its_victims_twice(run: Run) -> None:
    head = reference.random_prompt(256, 3)
    prompts = [head + reference.random_prompt(60 + 9 * i, 70 + i)[1:] for i in range(3)]
    configure(run, **FIXED)
    run.add(prompts[:1], [100])
    run.step(8)
    run.add(prompts[1:], [100, 100])
    run.step(12)
    slots = run.runtime.parking.slots
    parked = [run.table(f"r{i}").parked_ids() for i in range(3)]
    assert all(np.isin(np.arange(40, 100), ids).all() for ids in parked)
    assert slots.num_used == sum(map(len, parked))
    configure(run, evict_when="pressure")
    run.check()
    assert all(run.returns(f"r{i}") > 100 for i in range(3))


def test_a_forgotten_token_has_no_copy_and_does_not_come_back(run: Run) -> None:
    configure(run, **FIXED)
    run.add(PROMPTS[:1], [120], extra_args={"vtoken_forget": [20, 40]})
    run.step(8)
    assert not np.isin(np.arange(20, 40), run.table("r0").parked_ids()).any()
    assert np.isin(np.arange(50, 90), run.table("r0").parked_ids()).all()
    run.ask(Forget(request_id=run.id_of("r0"), spans=[(50, 60)]))
    configure(run, evict_when="pressure")
    run.step(6)
    live = run.table("r0").live_ids()
    assert not np.isin([*range(20, 40), *range(50, 60)], live).any()
    assert np.isin(np.arange(60, 90), live).all()
    run.check()


def test_a_preempted_request_has_no_copies_and_computes_everything_again(run: Run) -> None:
    configure(run, **FIXED)
    run.add(PROMPTS[:2], [90, 90])
    run.step(20)
    assert run.runtime.parking.slots.num_used > 0
    configure(run, evict_when="pressure")
    run.step(2)
    configure(run, evict_when="always")
    run.step(2)
    assert scheduler_of(run.llm).reset_prefix_cache(reset_running_requests=True)
    assert run.runtime.parking.slots.num_used == 0
    run.step(8)
    configure(run, evict_when="pressure")
    run.check()
    assert [len(stretches) for stretches in run.watch.stretches.values()] == [2, 2]


# ---------------------------------------------------------------- host memory


def test_park_bytes_at_0_loses_what_is_parked_and_takes_up_again(run: Run) -> None:
    configure(run, **FIXED)
    run.add(PROMPTS[:2], [150, 150])
    run.step(12)
    parked = run.runtime.parking.num_parked
    assert parked > 0
    live = set(run.table("r0").live_ids().tolist())
    run.ask(PatchConfig(patch={"park_bytes": 0}))
    run.step(1)
    assert run.runtime.parking.slots.num_used == 0
    assert run.counted("dropped_tokens") == parked
    assert live - set(run.table("r0").live_ids().tolist()) <= set(range(len(PROMPTS[0])))
    run.step(12)
    copied = run.counted("copied_tokens")
    run.ask(PatchConfig(patch={"park_bytes": 1 << 26}))
    run.step(20)
    assert run.counted("copied_tokens") > copied
    configure(run, evict_when="pressure")
    run.check()


def test_a_smaller_park_bytes_keeps_the_copies_that_fit(run: Run) -> None:
    configure(run, **FIXED)
    run.add(PROMPTS[:1], [120])
    run.step(12)
    token = run.runtime.geometry.bytes_per_token
    before = run.runtime.parking.num_parked
    run.ask(PatchConfig(patch={"park_bytes": 50 * token}))
    run.step(1)
    assert 0 < run.runtime.parking.slots.num_used <= 50 < before
    configure(run, evict_when="pressure")
    run.check()


def test_a_host_that_refuses_memory_costs_the_copies_of_that_step_and_nothing_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = run.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    copies = copies.model_runner.vtoken_host.model.host_copies
    configure(run, **FIXED)
    run.add(PROMPTS[:1], [160])
    run.step(12)
    before = run.runtime.parking.num_parked
    assert before > 0

    def refuse(num_slots: int) -> None:
        raise MemoryError(f"no memory for {num_slots} host slots")

    monkeypatch.setattr(copies, "_take", refuse)
    run.step_until(lambda: run.runtime.parking.fault)
    monkeypatch.undo()
    assert "no memory for" in run.runtime.parking.fault
    assert run.runtime.parking.num_parked == before  # what was parked before is still there
    copied = run.counted("copied_tokens")
    run.step(20)
    assert run.counted("copied_tokens") == copied
    run.ask(PatchConfig(patch={"park_bytes": (1 << 26) + 4096}))
    run.step(20)
    assert run.runtime.parking.fault == ""
    assert run.counted("copied_tokens") > copied
    configure(run, evict_when="pressure")
    run.check()


# ---------------------------------------------------------------- every policy

POLICIES = [name for name in policy_names() if name != "none"]
PARAMS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 16},
    "scissorhands": {"history_queries": 60},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_tokens_of_every_policy_come_back_and_give_way_again(
    overlap: bool, engine: Any, hf_model: Any
) -> None:
    scheduling = async_scheduling() if overlap else nullcontext()
    config = FIXED | {"budget_tokens": 64}
    pool = {"num_gpu_blocks_override": 300, "enable_prefix_caching": False}
    with scheduling, engine(**args(config, **pool)) as llm:
        run = Run(llm, hf_model)
        for number, policy in enumerate(POLICIES):
            rules = {"vtoken_policy": policy}
            run.add([reference.random_prompt(150, number)], [120], extra_args=rules)
        run.step(14)
        for budget in (128, 64, 400, 72):
            configure(run, budget_tokens=budget)
            run.step(16)
        run.check()
        assert all(run.returns(name) > 60 for name in run.prompts)
        assert run.runtime.counters.requests.preempted == 0
