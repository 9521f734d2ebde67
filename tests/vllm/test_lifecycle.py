"""Preemption, abort and finish on the real engine; refusals at start-up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer, core_of, runtime_of, scheduler_of
from tests.support.stepping import Outputs, add, step
from vtoken.sentences.situation import situation
from vtoken.vllm.touchpoints import register
from vtoken.wire import Guard
from vtoken.wire.commands import PatchConfig

pytestmark = pytest.mark.vllm

PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((400, 290, 350))]
FIXED = {
    "policy": {"name": "streaming_llm"},
    "budget_tokens": 64,
    "interval_tokens": 8,
    "evict_when": "always",
}


def args(**config: Any) -> dict[str, Any]:
    """What ships, in a pool in which `PROMPTS` soon give tokens."""
    pool = {"num_gpu_blocks_override": 37, "max_model_len": 1024}
    return pool | engine_args({"verify_ratio": 1.0, **config}, check_every_step=True)


def submit(llm: Any, prompts: list[list[int]], num_new: int, first: int = 0) -> None:
    for number, prompt in enumerate(prompts, first):
        add(llm, f"r{number}", prompt, num_new)


class Lives:
    """The requests before and after a preemption of all, each life with its victims."""

    def __init__(self, llm: Any) -> None:
        self._observer = Observer(llm)
        self._first: dict[str, dict[int, set[int]]] = {}
        self._so_far: dict[str, list[int]] = {}

    def end_first(self, tokens: Outputs) -> None:
        """All were preempted after `tokens`."""
        self._first, self._so_far = dict(self._observer.victims), dict(tokens)
        self._observer.victims.clear()

    def check(self, hf_model: Any, tokens: Outputs, num_new: int) -> None:
        """They saw their whole context again, and then gave anew."""
        for number, prompt in enumerate(PROMPTS):
            seen, found = self._so_far[f"r{number}"], tokens[f"r{number}"]
            log, known = self._log(self._first, number, len(prompt)), prompt + seen
            rest, left = found[len(seen) :], num_new - len(seen)
            assert seen == reference.generate(hf_model, prompt, len(seen), log, draft=seen)
            log = self._log(self._observer.victims, number, len(known))
            assert rest == reference.generate(hf_model, known, left, log, draft=rest)

    @staticmethod
    def _log(victims: dict[str, dict[int, set[int]]], number: int, known: int) -> reference.Evict:
        logs = [log for name, log in victims.items() if name.startswith(f"r{number}-")]
        return reference.replay({n - known: ids for log in logs for n, ids in log.items()})


def test_a_preempted_request_resumes_as_if_its_output_were_prompt(
    engine: Any, hf_model: Any
) -> None:
    num_new, before = 160, 70
    tokens: Outputs = {}
    with engine(enable_prefix_caching=False, **args()) as llm:
        lives = Lives(llm)
        submit(llm, PROMPTS, num_new)
        step(llm, tokens, before)
        runtime = runtime_of(llm)
        assert runtime.counters.pressure.given_tokens > 0
        assert scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)
        lives.end_first(tokens)
        assert len(runtime.tables) == 0
        step(llm, tokens)
        assert runtime.counters.requests.preempted == len(PROMPTS)
        kinds = [event.kind for event in runtime.events.page(0, 10_000).events]
        assert kinds.count("preemption") == len(PROMPTS)
        assert runtime.counters.invariants.violations == 0
    lives.check(hf_model, tokens, num_new)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_forgets_every_table_and_requests_resume_after_it(
    engine: Any, hf_model: Any, level: int
) -> None:
    num_new, before = 100, 70
    tokens: Outputs = {}
    with engine(enable_prefix_caching=True, **args()) as llm:
        pool = scheduler_of(llm).kv_cache_manager.block_pool
        lives = Lives(llm)
        submit(llm, PROMPTS, num_new)
        step(llm, tokens, before)
        runtime = runtime_of(llm)
        assert runtime.counters.pressure.given_tokens > 0
        lives.end_first(tokens)
        llm.sleep(level=level, mode="keep")
        assert len(runtime.tables) == 0
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not pool.cached_block_hash_to_block._cache
        assert scheduler_of(llm).vtoken_controller.reporter.status().scheduling == "paused"
        llm.wake_up()
        step(llm, tokens)
        assert runtime.counters.requests.preempted == len(PROMPTS)
        submit(llm, PROMPTS, num_new, first=len(PROMPTS))
        step(llm, tokens, before)
        llm.sleep(level=level, mode="abort")
        assert (len(runtime.tables), scheduler_of(llm).requests) == (0, {})
        assert runtime.counters.invariants.violations == 0
    lives.check(hf_model, tokens, num_new)


def test_waiting_and_preempted_requests_are_reported_as_such(engine: Any) -> None:
    tokens: Outputs = {}
    with engine(enable_prefix_caching=False, max_num_seqs=2, **args()) as llm:
        submit(llm, PROMPTS, 40)
        step(llm, tokens, 20)
        reporter = scheduler_of(llm).vtoken_controller.reporter

        def states() -> dict[str, str]:
            return {row.id.split("-")[0]: row.state for row in reporter.rows()}

        assert states() == {"r0": "running", "r1": "running", "r2": "waiting"}
        for name, sampled in tokens.items():
            assert reporter.request(name).output_tokens == len(sampled) > 1
        assert scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)
        assert states() == {"r0": "preempted", "r1": "preempted", "r2": "waiting"}
        rows = {row.id.split("-")[0]: row for row in reporter.rows()}
        num_sampled = len(tokens["r0"])
        assert (rows["r0"].prompt_tokens, rows["r0"].output_tokens) == (400, num_sampled)
        assert (rows["r2"].prompt_tokens, rows["r2"].output_tokens) == (350, 0)
        for row in rows.values():
            assert reporter.request(row.id).state == row.state
        step(llm, tokens)
        assert reporter.rows() == []
        for name in ("r0", "r1", "r2"):
            assert reporter.request(name).output_tokens == len(tokens[name]) == 40


def test_a_pause_is_no_step(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pause_s, paused_s, monotonic = 1_000.0, [0.0], time.monotonic  # no real step is as slow
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(paused_s))
    with engine(enable_prefix_caching=False, **args()) as llm:
        core = core_of(llm)
        submit(llm, PROMPTS, 20)
        step(llm, times=2)
        for _ in range(3):  # most of the times between two steps have a pause
            core.pause_scheduler("keep", clear_cache=False)
            paused_s.append(pause_s)
            core.resume_scheduler()
            step(llm, times=1)
        status = scheduler_of(llm).vtoken_controller.reporter.status()
        assert 0 < status.step_ms < 1e3 * pause_s / 100


def test_a_paused_engine_reports_it_and_excludes_the_pause_from_latencies(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: Outputs = {}
    pause_s, paused_s, monotonic = 1_000.0, [0.0], time.monotonic  # no real step is as slow
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + sum(paused_s))
    with engine(enable_prefix_caching=False, **args()) as llm:
        core = core_of(llm)
        controller = scheduler_of(llm).vtoken_controller
        submit(llm, PROMPTS, 80)
        step(llm, tokens, 30)
        p95 = "latency_seconds{kind=inter_token,quantile=0.95}"
        guards = [Guard(metric=p95, above=pause_s / 2), Guard(metric="preemptions", above=0)]
        trial = PatchConfig(patch={"batch_size": 9}, guards=guards, guard_for_s=10_000)
        controller.revisions.make(trial, "ann")
        step(llm, tokens, 1)
        before = controller.reporter.status()
        assert (before.scheduling, before.requests.running) == ("running", 3)
        for clear_cache in (False, True):  # the second one preempts all
            core.pause_scheduler("keep", clear_cache=clear_cache)
            paused_s.append(pause_s)
            paused = controller.reporter.status()
            assert paused.scheduling == "paused"
            assert situation(paused).startswith(
                "PAUSED: vLLM schedules nothing until it is resumed; "
            )
            assert core.is_scheduler_paused()
            core.resume_scheduler()
            step(llm, tokens, 8)
            after = controller.reporter.status()
            assert after.latency.inter_token.count > 0
            assert after.latency.inter_token.p99_ms < 1e3 * pause_s / 2
        assert after.scheduling == "running"
        assert after.requests.preempted == 3
        assert controller.revisions.document().trial is not None  # no guard was tripped
        events = runtime_of(llm).events.page(0, 10_000, "server").events
        found = [event.data["detail"] for event in events]
        assert found == ["started", "paused", "resumed", "paused", "resumed"]
        step(llm, tokens)
        assert {len(ids) for ids in tokens.values()} == {80}


def test_tables_follow_steps_without_evictions_through_a_hit_a_preemption_and_a_switch(
    engine: Any,
) -> None:
    tokens: Outputs = {}
    idle = engine_args(FIXED | {"policy": {"name": "none"}}, check_every_step=False)
    with engine(enable_prefix_caching=True, **idle) as llm:
        runtime = runtime_of(llm)
        submit(llm, PROMPTS, 120)
        step(llm, tokens, 10)
        table = next(iter(runtime.tables))
        known = table.num_tokens
        step(llm, tokens, 30)
        assert table.num_tokens == known + 30
        follow_up = PROMPTS[0] + tokens["r0"]
        submit(llm, [follow_up], 60, first=3)
        step(llm, tokens, 1)
        assert table.num_tokens == known + 31
        assert int((runtime.tables.pool.holders == 2).sum()) == len(follow_up) // 32
        runtime.check()
        step(llm, tokens, 10)
        scheduler = scheduler_of(llm)
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        runtime.check()
        step(llm, tokens, 10)
        policy = {"policy": {"name": "streaming_llm"}}
        scheduler.vtoken_controller.patch_config(policy)
        step(llm, tokens)
        assert runtime.counters.tokens.evicted > 0
        assert runtime.counters.invariants.violations == 0
        runtime.check()


def test_abort_and_finish_return_every_block(engine: Any) -> None:
    tokens: Outputs = {}
    context = 350 + 120 - 5  # the last one's answer is cut, and the second one's is not
    with engine(enable_prefix_caching=True, **args() | {"max_model_len": context}) as llm:
        runtime = runtime_of(llm)
        free = runtime.store.num_free_blocks()
        submit(llm, PROMPTS, 120)
        step(llm, tokens, 60)
        assert runtime.counters.reclamation.relocations > 0
        assert runtime.store.num_free_blocks() < free
        running = scheduler_of(llm).running[0].request_id
        llm.llm_engine.abort_request([running], internal=True)
        assert running not in runtime.tables
        step(llm, tokens)
        assert [len(tokens[name]) for name in ("r1", "r2")] == [120, 115]
        assert runtime.counters.serving.length_capped == 1
        assert len(runtime.tables) == 0
        assert runtime.store.num_free_blocks() == free
        assert runtime.tables.pool.num_used == 0
        runtime.check()


def test_an_evicting_request_is_never_cached_again(engine: Any, greedy: Any) -> None:
    with engine(enable_prefix_caching=True, **args(**FIXED)) as llm:
        (answer,) = greedy(llm, PROMPTS[:1], 200)
        manager = scheduler_of(llm).kv_cache_manager
        pool = manager.block_pool
        hashed = sum(block.block_hash is not None for block in pool.blocks)
        assert hashed == len(PROMPTS[0]) // 32  # the prompt's full blocks, nothing later
        # Continuing from prompt and answer hits no block of the evicted run.
        follow_up = PROMPTS[0] + answer
        fresh = greedy(llm, [follow_up], 40)
        assert runtime_of(llm).counters.invariants.violations == 0
    with engine(enable_prefix_caching=False, **args(**FIXED)) as llm:
        assert greedy(llm, [follow_up], 40) == fresh


def test_a_bad_initial_configuration_is_refused_with_its_bound(engine: Any) -> None:
    with (
        pytest.raises(Exception, match=r"theta_f = 2 is not a number in 0\.\.1"),
        engine(**args(theta_f=2)),
    ):
        pass


def test_a_vllm_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = register.TouchPoint(
        "vllm.v1.core.block_pool:BlockPool.free_blocks", "call", "reclaim", ("bricks",)
    )
    missing = register.TouchPoint("vllm.v1.core.block_pool:Pond", "call", "reclaim")
    monkeypatch.setattr(register, "TOUCH_POINTS", (strange, missing))
    first, second = register.differences()
    assert "no longer takes bricks" in first
    assert "Pond is missing" in second
