"""The shadow policy: called once at each eviction, counted, and never applied."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.core.test_scoring import LAST, SUM, choice
from tests.support.core.harness import CoreEngine
from tests.support.core.live import Words, controller_of
from tests.support.core.request_step import parts_of
from vtoken.base.errors import RefusedError
from vtoken.core.config.request_rules import request_rules
from vtoken.policies import Batch, Policy
from vtoken.wire import PatchResult, Shadow


def crowd(policy: str, shadow: str | None = None, *, lag: int = 0, **config: Any) -> CoreEngine:
    """A small pool: evictions, relocations, recycling, preemptions."""
    values = {
        "policy": choice(policy),
        "shadow": None if shadow is None else choice(shadow),
        "budget_tokens": 24,
        "evict_when": "always",
        "interval_tokens": 3,
        "theta_f": 0.1,
        "low_watermark_blocks": 56,
        "headroom_blocks": 4,
        "prefix_sharing": "copy",
    }
    engine = CoreEngine(
        num_blocks=56, config=values | config, worker_lag_steps=lag, check_every_step=False
    )
    engine.prefill_chunk_tokens = 16
    for i in range(5):
        engine.add(f"r{i}", 44, prefix="p", prefix_tokens=13, max_tokens=60, seed=i)
    return engine


def patch(engine: CoreEngine, **changes: Any) -> PatchResult:
    return controller_of(engine).patch_config(changes)


def shadow_of(engine: CoreEngine) -> Shadow:
    shadow = controller_of(engine).reporter.status().shadow
    assert shadow is not None
    return shadow


def history(engine: CoreEngine, num_steps: int) -> list[Any]:
    """Everything a step did: tables, plans, events, counters."""
    out: list[Any] = []
    for _ in range(num_steps):
        plan = engine.step()
        tables = {t.request_id: (list(t.blocks), t.grid().tolist()) for t in engine.runtime.tables}
        orders = {
            name: (part.evicted.tolist(), part.moved_slots.tolist(), part.new_slots.tolist())
            for name, part in parts_of(plan.requests).items()
        }
        events = [msgspec.to_builtins(e) | {"ts": 0} for e in engine.runtime.events.drain()]
        for event in events:
            event["data"].pop("plan_us", None)
        counters = msgspec.to_builtins(engine.runtime.counters)
        counters["reclamation"]["plan_us"] = 0
        out.append((tables, orders, events, counters, engine.num_preemptions))
    return out


@pytest.mark.parametrize(
    ("policy", "shadow", "lag"),
    [
        ("streaming_llm", "random", 0),
        ("streaming_llm", "tova", 1),
        ("streaming_llm", "fastgen", 0),
        ("h2o", "streaming_llm", 0),
        ("h2o", "tova", 0),
        ("h2o", "tova", 1),
        ("h2o", "fastgen", 1),
        ("h2o", "keydiff", 0),
        ("knorm", "keydiff", 1),
        ("knorm", "h2o", 0),
    ],
)
def test_a_run_is_the_same_with_and_without_a_shadow(policy: str, shadow: str, lag: int) -> None:
    engines = [crowd(policy, lag=lag), crowd(policy, shadow, lag=lag)]
    for engine in engines:
        if shadow == "fastgen":
            engine.runtime.ranking.vocabulary = Words()
    alone, beside = (history(engine, 80) for engine in engines)
    assert alone == beside
    assert alone[-1][3]["tokens"]["evicted"] > 100
    tally = shadow_of(engines[1])
    assert tally.error is None
    assert tally.compared > 20
    assert tally.compared + tally.waiting == evictions(engines[1])


def evictions(engine: CoreEngine) -> int:
    """The number of evictions: requests with victims, summed over steps."""
    events = engine.runtime.events.page(0, 100_000).events
    return sum(event.data["requests"] for event in events if event.kind == "eviction")


def test_the_tally_is_the_overlap_of_victims_and_the_shadows_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = crowd("random", "streaming_llm")
    shadow = engine.runtime.config.shadow
    assert shadow is not None
    named: list[set[int]] = []
    died: list[set[int]] = []

    def watched(policy: Policy, log: list[set[int]]) -> None:
        select = policy.select_many

        def wrapper(batch: Batch) -> Any:
            found = select(batch)
            assert found is not None
            log.extend(set(found.of(i).tolist()) for i in range(len(batch.budget)))
            return found

        monkeypatch.setattr(policy, "select_many", wrapper)

    watched(shadow, named)
    watched(engine.runtime.config.policy, died)
    history(engine, 80)
    tally = shadow_of(engine)
    assert tally.compared == len(named) == len(died) > 20  # once an eviction
    assert tally.victims == sum(map(len, died)) == engine.runtime.counters.tokens.evicted
    assert tally.agreed == sum(len(a & b) for a, b in zip(named, died, strict=True))
    assert 0 < tally.agreed < tally.victims


def test_a_policy_agrees_with_itself() -> None:
    engine = crowd("h2o", "h2o")
    history(engine, 60)
    tally = shadow_of(engine)
    assert tally.agreed == tally.victims == engine.runtime.counters.tokens.evicted > 0


def test_the_worker_reports_both_signals_before_an_eviction() -> None:
    engine = crowd("h2o", "tova", interval_tokens=6)
    plans = [engine.step() for _ in range(40)]
    kept = {signals for plan in plans for signals in plan.signals.values()}
    assert kept == {(SUM, LAST)}
    for plan in plans:
        reported = {name for name, _ in plan.want_scores}
        assert len(plan.want_scores) == 2 * len(reported)
    assert any(plan.want_scores for plan in plans)
    assert any(plan.signals and not plan.want_scores for plan in plans)


def test_no_scores_are_requested_for_a_shadow_while_the_policy_is_none() -> None:
    engine = crowd("none", "tova")
    assert all(not engine.step().signals for _ in range(10))
    result = patch(engine, shadow={"name": "h2o"})
    assert result.notes == ["policy none evicts nothing that shadow h2o could be compared with"]


def test_an_eviction_before_the_shadows_first_scores_is_counted_as_waiting() -> None:
    engine = crowd("streaming_llm", interval_tokens=0)
    history(engine, 20)
    notes = patch(engine, shadow={"name": "tova"}).notes
    assert notes == ["shadow tova is compared on a running request after its next probed query"]
    before = evictions(engine)
    history(engine, 1)
    tally = shadow_of(engine)
    assert (tally.compared, tally.waiting) == (0, evictions(engine) - before)
    assert tally.waiting > 0
    history(engine, 10)
    assert shadow_of(engine).compared > 0


def test_a_failed_shadow_is_reported_and_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = crowd("streaming_llm", "tova")
    calls: list[Batch] = []

    def fail(batch: Batch) -> Any:
        calls.append(batch)
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(engine.runtime.config.shadow, "select_many", fail)
    history(engine, 60)
    tally = shadow_of(engine)
    assert tally.error == "ZeroDivisionError('of its own')"
    assert (len(calls), tally.compared) == (1, 0)
    assert engine.runtime.counters.invariants.violations == 0
    assert engine.runtime.counters.tokens.evicted > 0
    assert not engine.step().signals  # nor is the worker
    patch(engine, shadow=None)
    patch(engine, shadow={"name": "tova"})
    history(engine, 20)
    assert shadow_of(engine).error is None


@pytest.mark.parametrize("victims", [[], [0], [0, 0, 0, 0]])
def test_a_shadow_with_too_few_victims_is_reported(
    victims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = crowd("streaming_llm", "random")
    monkeypatch.setattr(engine.runtime.config.shadow, "select_victims", lambda _: np.array(victims))
    history(engine, 60)
    assert "different victims" in (shadow_of(engine).error or "")


def test_counts_begin_when_a_shadow_is_configured_and_null_removes_it() -> None:
    engine = crowd("streaming_llm", "random")
    history(engine, 40)
    assert shadow_of(engine).compared > 0
    patch(engine, theta_f=0.3)
    history(engine, 1)
    assert shadow_of(engine).compared > 0
    patch(engine, shadow={"params": {"sinks": 3}})
    history(engine, 1)
    assert shadow_of(engine).policy.params["sinks"] == 3
    assert shadow_of(engine).compared < 10
    assert patch(engine, shadow=None).changes["shadow"][1] is None
    history(engine, 1)
    assert controller_of(engine).reporter.status().shadow is None


def test_a_shadow_that_becomes_the_policy_evicts_at_once() -> None:
    """Its scores were kept before."""
    engine = crowd("streaming_llm", "h2o", interval_tokens=0)
    history(engine, 25)
    result = patch(engine, policy=choice("h2o"), shadow=choice("streaming_llm"))
    assert result.notes == ["scores carry over: shadow h2o and h2o read attention_sum (layer 2)"]
    before = engine.runtime.counters.tokens.evicted
    history(engine, 1)
    assert engine.runtime.counters.tokens.evicted > before


def test_a_request_with_a_budget_below_what_the_shadow_needs_is_not_compared() -> None:
    engine = crowd("streaming_llm", "h2o", budget_tokens=30)
    engine.running.clear()
    engine.waiting.clear()
    engine.runtime.announce(
        "own",
        request_rules(
            {
                "vtoken_policy": "random",
                "vtoken_policy_params": '{"sinks": 0, "recent": 1}',
                "vtoken_budget_tokens": 3,
            }
        ),
    )
    engine.add("own", 20, max_tokens=20)
    history(engine, 10)
    tally = shadow_of(engine)
    assert (tally.compared, tally.waiting > 0) == (0, True)


def test_a_shadow_that_this_engine_cannot_run_is_refused_by_name() -> None:
    engine = crowd("streaming_llm")
    with pytest.raises(RefusedError) as caught:
        patch(engine, shadow={"name": "fastgen"})
    assert (caught.value.field, caught.value.value) == ("shadow.name", "fastgen")
