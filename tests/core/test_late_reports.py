"""Reports one step late, as under asynchronous scheduling: which are used, and what waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.core.harness import CoreEngine, LiveEngine, make_engine, make_holes
from tests.support.observe import watch_victims
from vtoken.core.protocol.step import WorkerReport
from vtoken.core.runtime.growth import Scheduled
from vtoken.policies.signals import Signal

SUM = Signal("attention_sum", layers=(2,))  # of the 4 layers of a `CoreEngine`
PARAMS: dict[str, dict[str, Any]] = {
    "h2o": {"pool_radius": 0},
    "random": {"recent": 2, "sinks": 1},
}
H2O = {"name": "h2o", "params": PARAMS["h2o"]}


def late(policy: str = "h2o", *, lag: int = 1, **config: Any) -> CoreEngine:
    values: dict[str, Any] = {
        "policy": {"name": policy, "params": PARAMS[policy]},
        "budget_tokens": 16,
        "evict_when": "always",
        "interval_tokens": 5,
        "theta_f": 0.0,
        "low_watermark_blocks": 64,
        "headroom_blocks": 8,
        "recycle": False,
    }
    engine = CoreEngine(worker_lag_steps=lag, config=values | config)
    for i in range(3):
        engine.add(f"r{i}", 30, max_tokens=200, seed=i)
    return engine


def ages_of_scores(engine: CoreEngine, num_steps: int) -> set[int]:
    """The number of tokens newer than the scores, at every eviction."""
    ages: set[int] = set()

    def note(table: Any, victims: Any) -> None:
        if victims is not None:
            scores = engine.runtime.requests.held[table.request_id].scores_of(SUM)
            assert scores is not None
            ages.add(table.num_tokens - len(scores))

    watch_victims(engine.runtime, note)
    engine.run(num_steps)
    return ages


@pytest.mark.parametrize("lag", [0, 1])
def test_scores_are_exactly_as_old_as_the_steps_in_flight(lag: int) -> None:
    engine = late(lag=lag)
    assert ages_of_scores(engine, 80) == {lag}
    assert engine.runtime.counters.tokens.evicted > 150


@pytest.mark.parametrize("lag", [0, 1])
def test_the_eviction_at_the_prompts_end_waits_for_its_scores_and_happens_once(lag: int) -> None:
    engine = late(lag=lag, evict_during="prefill").run(1 + lag)
    assert engine.runtime.counters.tokens.evicted == 0
    engine.run(30)
    assert engine.runtime.counters.tokens.evicted == 3 * (30 + lag - 16)  # down to the budget
    assert all(table.num_live > 16 + 5 for table in engine.runtime.tables)


@pytest.mark.parametrize("policy", PARAMS)
def test_a_step_of_no_request_has_a_plan_while_a_request_keeps_signals(policy: str) -> None:
    """Without one, the worker forgets the attention that it has recorded."""
    runtime = late(policy, budget_tokens=100).run(2).runtime
    runtime.begin_step([])
    plan = runtime.commit_step(Scheduled())
    assert runtime.concerns_worker(plan) == (policy == "h2o")


def test_control_scores_asked_for_only_when_due_would_be_an_interval_old() -> None:
    engine = late()
    runtime, picked = engine.runtime, []
    live, due = runtime.tables.columns, runtime.requests.due
    runtime.ranking.soon_due = lambda rows: live.num_live[rows] > due.limit[rows]  # type: ignore[method-assign]
    watch_victims(runtime, lambda _, victims: picked.append(victims))
    engine.run(80)
    assert any(victims is None for victims in picked[10:])  # too old: it had to wait a step


def test_a_lowered_budget_waits_for_scores_of_now() -> None:
    """Scores of the last eviction exist but do not cover the tokens since."""
    engine = late(lag=0, interval_tokens=30).run(25)
    before = engine.runtime.counters.tokens.evicted
    assert before > 0
    engine.runtime.active.config = replace(engine.runtime.config, interval_tokens=0)
    assert ages_of_scores(engine, 1) == set()
    assert engine.runtime.counters.tokens.evicted == before
    assert ages_of_scores(engine, 1) == {0}
    assert engine.runtime.counters.tokens.evicted > before


def test_scores_for_the_policy_before_the_switch_are_not_believed() -> None:
    fixed = {"budget_tokens": 32, "interval_tokens": 0, "evict_when": "always"}
    config = {"policy": H2O} | fixed
    with make_engine(concurrency=1, prompt_tokens=40, max_tokens=400, config=config) as live:
        live.core.worker_lag_steps = 1
        live.steps(4)
        runtime = live.core.runtime
        (name,) = runtime.requests.held
        in_flight = WorkerReport(runtime.step, scores={(name, SUM): np.ones(3, dtype=np.float32)})
        live.call("patch_config", patch={"policy": {"name": "random"}})
        live.steps()
        live.call("patch_config", patch={"policy": H2O})
        runtime.finish_step(in_flight, in_flight.step)
        assert runtime.requests.held[name].scores_of(SUM) is None
        live.steps(3)
        assert runtime.requests.held[name].scores_of(SUM) is not None


def test_a_relocation_of_an_earlier_life_does_not_end_the_one_in_flight() -> None:
    engine = late("random", lag=1, batch_size=2)
    while not engine.runtime.relocator.num_in_flight_tokens:
        engine.step()
    requests = engine.runtime.requests
    name = next(filter(requests.in_flight_step, requests.held))
    earlier = requests.in_flight_step(name)
    requests.due.in_flight[requests.tables.rows[name]] = (
        earlier + 1
    )  # preempted, back, relocated again
    moved = engine.runtime.relocator.num_planned_copies(earlier)
    engine.runtime.finish_step(WorkerReport(earlier, moved_tokens=moved), earlier)
    assert requests.in_flight_step(name) == earlier + 1


# ---------------------------------------------------------------- manual compactions


@pytest.fixture
def holes() -> Iterator[LiveEngine]:
    with make_holes(2) as live:
        live.core.worker_lag_steps = 1
        yield live


@pytest.mark.parametrize("request_id", ["req-0", None])
def test_a_compaction_waits_for_the_relocation_in_flight(
    holes: LiveEngine, request_id: str | None
) -> None:
    first = holes.call("compact", request_id="req-0", batch_size=3)
    holes.steps()
    assert holes.core.runtime.relocator.num_in_flight_tokens > 0
    second = holes.call("compact", request_id=request_id, batch_size=64)
    holes.steps()
    assert holes.call("operation", id=first.id).state == "done"
    assert holes.call("operation", id=second.id).state == "pending"
    holes.steps(2)
    done = holes.call("operation", id=second.id)
    assert done.state == "done"
    assert done.result.freed_blocks > 0


def test_a_compaction_that_waits_is_settled_when_the_last_request_ends(holes: LiveEngine) -> None:
    holes.call("compact", batch_size=3)
    holes.steps()
    one = holes.call("compact", request_id="req-0")
    everything = holes.call("compact")
    for request in list(holes.core.running):
        holes.core.remove(request.id)
    failed = holes.call("operation", id=one.id)
    assert failed.state == "failed"
    assert "req-0" in failed.error
    assert holes.call("operation", id=everything.id).state == "done"
    assert not holes.core.runtime.operations.list_pending()


# ---------------------------------------------------------------- requests that do not come back


def test_a_request_aborted_while_it_waits_leaves_nothing_behind() -> None:
    engine = late(lag=0).run(3)
    name = engine.running[-1].id
    engine.preempt_newest()
    assert engine.runtime.requests.announced[name].num_preemptions == 1
    engine.remove(name)
    assert name not in engine.runtime.requests.announced
    assert name not in {request.id for request in engine.waiting}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_is_evicted_between_its_chunks_by_the_report_of_the_chunk_before(lag: int) -> None:
    engine = late(lag=lag, evict_during="prefill", interval_tokens=0)
    engine.prefill_chunk_tokens = 8
    engine.running.clear()
    engine.waiting.clear()
    engine.add("long", 60, max_tokens=20)
    assert ages_of_scores(engine, 7) == {8 * lag}
    assert engine.runtime.tables["long"].num_live <= 16 + 8 * (1 + lag)
