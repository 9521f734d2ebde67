"""The signals that the worker keeps, and scores after a change of policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine, SimulatedWorker
from tests.support.core.live import controller_of
from vtoken.core.config.request_rules import request_rules
from vtoken.core.protocol.step import StepPlan
from vtoken.core.runtime.held_request import SignalState
from vtoken.policies.base import Policy, check_declared
from vtoken.policies.knorm import KNorm
from vtoken.policies.signals import Signal, kind_of
from vtoken.wire import PatchResult
from vtoken.wire.commands import PatchConfig

SUM, LAST = (
    Signal("attention_sum", layers=(2,)),
    Signal("attention_last", pool_radius=3, layers=(2,)),
)
PARAMS: dict[str, dict[str, Any]] = {
    "h2o": {"pool_radius": 0},
    "tova": {"heads": "mean", "pool_radius": 3},
    "knorm": {"recent": 1},
}
TOVA = {"policy": {"name": "tova", "params": PARAMS["tova"]}, "evict_when": "always"}


def choice(policy: str) -> dict[str, Any]:
    """A policy with the parameters that the numbers here are for."""
    return {"name": policy, "params": PARAMS.get(policy, {})}


def engine_with(policy: str, *, lag: int = 0, budget: int = 8, **config: Any) -> CoreEngine:
    return CoreEngine(
        num_blocks=64,
        block_size=4,
        config={
            "policy": choice(policy),
            "budget_tokens": budget,
            "evict_when": "always",
            "interval_tokens": 2,
            **config,
        },
        worker_lag_steps=lag,
    )


def patch(engine: CoreEngine, **changes: Any) -> PatchResult:
    return controller_of(engine).patch_config(changes)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("policy", ["none", "streaming_llm", "sliding_window", "random"])
def test_a_policy_without_signal_asks_the_worker_nothing(policy: str) -> None:
    engine = engine_with(policy, budget=20)
    engine.add("a", 30)
    for _ in range(6):
        plan = engine.step()
        idle = StepPlan(plan.step)
        for name in ("want_scores", "signals", "probed"):
            assert getattr(plan, name) == getattr(idle, name)


def test_prompt_queries_are_probed_in_every_step_and_decode_queries_in_every_kth() -> None:
    engine = engine_with("h2o", probe={"layers": [2], "every_steps": 4})
    engine.prefill_chunk_tokens = 5
    engine.add("a", 18)
    plans = [engine.step() for _ in range(12)]
    assert [bool(plan.probed) for plan in plans] == [
        plan.step <= 4 or plan.step % 4 == 0 for plan in plans
    ]
    assert all(plan.signals == {"a": (SUM,)} for plan in plans)


def test_keys_are_looked_at_only_when_scores_are_wanted() -> None:
    engine = engine_with("knorm")
    engine.add("a", 4)
    for _ in range(30):
        plan = engine.step()
        assert plan.probed == frozenset()
        assert tuple(plan.signals) == tuple(name for name, _ in plan.want_scores)
        num_live = engine.runtime.tables["a"].num_live
        assert bool(plan.want_scores) == (num_live > 10)


def test_each_request_keeps_the_signal_of_its_own_policy() -> None:
    engine = engine_with("h2o")
    engine.runtime.announce(
        "t",
        request_rules(
            {"vtoken_policy": "tova", "vtoken_policy_params": json.dumps(PARAMS["tova"])}
        ),
    )
    engine.runtime.announce("s", request_rules({"vtoken_policy": "streaming_llm"}))
    for name in ("h", "t", "s"):
        engine.add(name, 12)
    assert engine.step().signals == {"h": (SUM,), "t": (LAST,)}


# ---------------------------------------------------------------- layers and heads


def signals_of(engine: CoreEngine) -> tuple[Signal, ...]:
    """The signals that the worker keeps for one request."""
    engine.add("a", 12)
    return engine.step().signals["a"]


@pytest.mark.parametrize(("num_layers", "layer"), [(1, 0), (2, 1), (4, 2), (10, 7), (30, 21)])
def test_without_settings_signals_come_from_a_layer_at_0_7_of_the_depth(
    num_layers: int, layer: int
) -> None:
    engine = CoreEngine(config=TOVA, num_layers=num_layers)
    assert signals_of(engine) == (Signal("attention_last", pool_radius=3, layers=(layer,)),)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("attention_window", 21), ("attention_sum", 21), ("key_norm", 18), ("key_difference", 14)],
)
def test_the_default_depth_is_that_of_the_kind_of_signal(kind: str, layer: int) -> None:
    assert kind_of(kind).default_layer(30) == layer
    assert kind_of(kind).default_layer(1) == 0


@pytest.mark.parametrize(
    ("probe", "layers", "heads"),
    [
        ({"layers": [0]}, (0,), ()),
        ({"heads": [1]}, (2,), (1,)),
        ({"layers": [2, 0], "heads": [3, 1]}, (0, 2), (1, 3)),
    ],
)
def test_settings_come_before_the_default_depth(
    probe: dict[str, Any], layers: tuple[int, ...], heads: tuple[int, ...]
) -> None:
    engine = CoreEngine(config=TOVA | {"probe": probe})
    assert signals_of(engine) == (
        Signal("attention_last", pool_radius=3, layers=layers, heads=heads),
    )


def test_other_heads_make_scores_start_anew() -> None:
    engine = engine_with("tova")
    engine.add("a", 20)
    engine.step()
    notes = patch(engine, probe={"heads": [1, 3]}).notes
    pooled = "mean over 3 neighbours a side"
    now = f"tova reads attention_last (layer 2; heads 1, 3; {pooled})"
    was = f"attention_last (layer 2; {pooled})"
    assert f"scores start anew: {now}, until now it was {was}" in notes[0]
    state = engine.runtime.requests.held["a"]
    held = state.scores_of(LAST)
    assert held is not None
    engine.step()
    assert state.scores_of(LAST) is None


def test_a_policy_may_not_name_layers_or_heads() -> None:
    class Here(Policy):
        name, summary = "here", "s"

        def signal(self) -> Signal:
            return Signal("key_norm", layers=(1,))

    with pytest.raises(ValueError, match="here names layers or heads"):
        check_declared(Here())


# ---------------------------------------------------------------- answers


@contextmanager
def silent(worker: SimulatedWorker) -> Iterator[None]:
    """Reports have no scores."""
    execute = worker.execute

    def without_scores(message: Any) -> Any:
        report = execute(message)
        report.scores.clear()
        return report

    with mock.patch.object(worker, "execute", without_scores):
        yield


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_scores_of_an_earlier_eviction_are_not_used_again(lag: int) -> None:
    """Scores are not requested between evictions; earlier ones are stale when the next is due."""
    worker = SimulatedWorker(64, 4)
    ages: list[int] = []
    engine = engine_with("h2o", lag=lag, interval_tokens=6)
    engine.worker = worker
    current = engine.runtime.ranking.current

    def watch(state: Any, *rest: Any) -> Any:
        found = current(state, *rest)
        if found is not None:
            ages.append(engine.runtime.step - state.signals[SUM].scores_step)
        return found

    engine.runtime.ranking.current = watch  # type: ignore[method-assign]
    engine.add("a", 20)
    engine.steps(60)
    assert len(ages) > 5
    assert set(ages) == {lag + 1}


def test_a_report_from_before_the_change_of_policy_is_not_taken_for_the_new_signal() -> None:
    engine = engine_with("h2o", lag=1)
    engine.add("a", 20)
    engine.step()
    patch(engine, policy=choice("tova"))
    state = engine.runtime.requests.held["a"]
    engine.step()  # brings the report of the first step, in which h2o's signal was kept
    assert tuple(state.signals) == (LAST,)
    assert state.scores_of(LAST) is None
    assert engine.runtime.counters.tokens.evicted == 0
    engine.step()
    assert state.scores_of(LAST) is not None


def test_nothing_dies_between_a_change_of_signal_and_its_first_report() -> None:
    engine = engine_with("none")
    engine.add("a", 40)
    engine.step()
    patch(engine, policy={"name": "snapkv", "params": {"window": 4}})
    with silent(engine.worker):
        engine.steps(5)
    assert engine.runtime.counters.tokens.evicted == 0
    engine.step()
    engine.step()
    assert engine.runtime.tables["a"].num_live == 9


# ---------------------------------------------------------------- hot swap


def test_scores_carry_over_to_a_policy_that_reads_the_same_signal() -> None:
    engine = engine_with("h2o")
    engine.add("a", 20)
    engine.step()
    state = engine.runtime.requests.held["a"]
    held = state.scores_of(SUM)
    result = patch(engine, policy={"name": "h2o", "params": PARAMS["h2o"] | {"normalize": True}})
    assert result.notes == ["scores carry over: h2o and h2o read attention_sum (layer 2)"]
    engine.step()
    assert held is not None
    assert engine.runtime.counters.tokens.evicted == 12  # at once


def test_the_answer_and_the_event_say_that_scores_start_anew_and_what_is_waited_for() -> None:
    engine = engine_with("h2o")
    engine.add("a", 20)
    engine.step()
    params = {"history_queries": 400, "recent": 2}
    notes = patch(engine, policy={"name": "scissorhands", "params": params}).notes
    assert len(notes) == 1
    reads = "scissorhands reads attention_hits(400) (layer 2)"
    assert f"{reads}, until now it was attention_sum (layer 2)" in notes[0]
    assert "32 probed queries" in notes[0]
    event = engine.runtime.events.page(0, 100).events[-1]
    assert event.kind == "config"
    assert event.data["notes"] == notes
    engine.step()
    assert engine.runtime.counters.tokens.evicted == 0


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        ({"policy": {"name": "streaming_llm"}}, False),
        ({"theta_f": 0.5}, False),
        ({"probe": {"layers": [2]}}, False),  # the layer at 0.7 of the depth, which it was
        ({"probe": {"layers": [1, 2]}}, True),
        ({"probe": {"heads": [0, 1, 2]}}, True),
        ({"policy": {"name": "h2o", "params": {"pool_radius": 2}}}, True),
        ({"policy": {"name": "keydiff", "params": {"recent": 1}}}, True),
    ],
)
def test_only_what_touches_scores_is_noted(change: dict[str, Any], noted: bool) -> None:
    engine = engine_with("h2o")
    assert bool(patch(engine, **change).notes) == noted


def test_a_dry_run_notes_the_same_and_changes_nothing() -> None:
    engine = engine_with("h2o")
    controller = controller_of(engine)
    change = {"policy": {"name": "tova"}}
    dry = controller.revisions.preview(PatchConfig(patch=change))
    assert engine.runtime.config.policy.name == "h2o"
    assert dry.notes == controller.patch_config(change).notes != []


# ---------------------------------------------------------------- readings of keys


def giving(engine: CoreEngine) -> CoreEngine:
    """`engine`, in which every request is about to give tokens for blocks, and gives none."""
    runtime = engine.runtime
    runtime.shortages.is_near = lambda: True  # type: ignore[method-assign]
    runtime.shortages.soon = lambda rows: rows  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("recent", "radius", "lacks"), [(8, 2, 5), (8, 0, 8), (1, 0, 1), (2, 3, 0)]
)
def test_keys_are_read_again_only_when_a_token_that_the_reading_lacks_could_be_a_victim(
    recent: int, radius: int, lacks: int, lag: int
) -> None:
    params = {"recent": recent, "pool_radius": radius}
    config = {"policy": {"name": "knorm", "params": params}, "evict_when": "pressure"}
    engine = giving(CoreEngine(config=config | {"budget_tokens": 16}, worker_lag_steps=lag))
    engine.add("a", 30, max_tokens=100)
    read = [engine.runtime.step for _ in range(40) if engine.step().want_scores]
    assert {b - a for a, b in pairwise(read)} == {max(1, lacks - lag + 1)}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_reading_ranks_a_request_until_the_next_one_arrives(lag: int) -> None:
    config = {"policy": {"name": "knorm"}, "evict_when": "pressure", "budget_tokens": 24}
    engine = giving(CoreEngine(config=config, worker_lag_steps=lag))
    engine.add("a", 30, max_tokens=100)
    run = [engine.step() for _ in range(1 + lag)]
    runtime = engine.runtime
    for _ in range(40):
        assert runtime.ranking.can_choose(runtime.tables["a"])
        run.append(engine.step())
    assert sum(bool(plan.want_scores) for plan in run) < 6


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("interval", [0, 3])
def test_every_cut_follows_a_reading_of_its_own_as_soon_as_it_is_due(
    interval: int, lag: int
) -> None:
    config = {"policy": {"name": "knorm"}, "evict_when": "always", "interval_tokens": interval}
    engine = CoreEngine(config=config | {"budget_tokens": 24}, worker_lag_steps=lag)
    runtime = engine.runtime
    engine.add("a", 60, max_tokens=100)
    read, died = [], []
    for _ in range(40):
        before = runtime.counters.tokens.evicted
        plan = engine.step()
        if plan.want_scores:
            read.append(plan.step)
        if runtime.counters.tokens.evicted > before:
            died.append(plan.step)
    assert {b - a for a, b in pairwise(died)} == {interval + 1}
    assert [step - 1 - lag for step in died] == [step for step in read if step + 1 + lag <= 40]


@pytest.mark.parametrize(("anchor", "keeps"), [("seen", True), ("live", False)])
def test_a_signal_whose_anchor_is_of_all_tokens_seen_is_kept_between_readings(
    anchor: str, keeps: bool
) -> None:
    config = {"policy": {"name": "keydiff", "params": {"anchor": anchor}}, "budget_tokens": 24}
    engine = giving(CoreEngine(config=config | {"evict_when": "pressure"}))
    engine.add("a", 30, max_tokens=100)
    plans = [engine.step() for _ in range(12)]
    between = [plan for plan in plans[1:] if not plan.want_scores]
    assert between
    assert plans[0].want_scores
    assert {bool(plan.signals) for plan in between} == {keeps}


def test_control_a_reading_from_before_a_token_died_or_came_back_does_not_hold() -> None:
    kept = SignalState(Signal("key_norm", layers=(2,)), KNorm(), requested=True)
    kept.ask(3, 40, 0)
    kept.scores, kept.scores_step = np.zeros(40, dtype=np.float32), 3
    assert kept.holds(40 + kept.spared_tokens, 0)
    assert not kept.holds(40 + kept.spared_tokens + 1, 0)
    for changes in (1, 2):  # a token died, and came back
        assert not kept.holds(41, changes)
        kept.ask(5, 42, changes)
        assert not kept.holds(42, changes)  # the reading of step 5 is on its way


class LivingWorker(SimulatedWorker):
    """Dead tokens have no number, as in a worker's reports."""

    def execute(self, message: Any) -> Any:
        report = super().execute(message)
        for (request_id, _), scores in report.scores.items():
            live = self.live_slots(self.mirrors[request_id])
            scores[[token not in live for token in range(len(scores))]] = np.inf
        return report


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("policy", ["knorm", "h2o"])
def test_no_token_that_came_back_dies_for_want_of_a_number(policy: str, lag: int) -> None:
    """The budget is lowered right after a raise has brought them back. With a late report, a
    reading of keys from before that is used once.
    """
    engine = engine_with(
        policy,
        lag=lag,
        budget=24,
        interval_tokens=4,
        headroom_blocks=2,
        low_watermark_blocks=0,
        park_bytes=1 << 20,
        restore_after_ms=0,
    )
    engine.worker = LivingWorker(64, 4)
    runtime, used = engine.runtime, []
    current = runtime.ranking.current

    def watch(state: Any, *rest: Any) -> Any:
        found = current(state, *rest)
        used.append(found)
        return found

    runtime.ranking.current = watch  # type: ignore[method-assign]
    engine.add("a", 60, max_tokens=100)
    engine.steps(11)
    patch(engine, budget_tokens=50)
    while not len((plan := engine.step()).requests.restored_ids.values):
        assert plan.step < 20
    back = plan.requests.restored_ids.values
    patch(engine, budget_tokens=30)
    used.clear()
    while not len((plan := engine.step()).requests.evicted.values):
        assert plan.step < 30
    victims, scores = plan.requests.evicted.values, used[-1]
    assert len(victims) > len(back) // 2
    assert np.isfinite(scores[victims]).all()
    assert np.isinf(scores[back]).any() == (policy == "knorm" and lag == 1)


def test_a_reading_that_never_arrives_is_asked_for_again() -> None:
    config = {"policy": {"name": "knorm"}, "evict_when": "pressure", "budget_tokens": 24}
    engine = giving(CoreEngine(config=config, worker_lag_steps=1))
    engine.add("a", 30, max_tokens=100)
    with silent(engine.worker):
        asked = [bool(engine.step().want_scores) for _ in range(6)]
    assert asked == [True, False, True, False, True, False]
