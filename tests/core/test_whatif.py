"""Dry runs are exact: in any state, applying the change does what the dry run predicted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.support.core.live import LiveEngine, make_engine, make_holes, make_pressed
from vtoken.core.planning.gates import CONDITIONS
from vtoken.wire import Operation, PatchResult, WhatIf

POLICIES = st.sampled_from(
    [
        {"name": "random", "params": {"sinks": 1, "recent": 2}},
        {"name": "streaming_llm", "params": {"sinks": 1}},
        {"name": "h2o", "params": {"sinks": 1}},
        {"name": "none"},
    ]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "policy": POLICIES,
    "budget_tokens": st.integers(8, 40),
    "interval_tokens": st.sampled_from([0, 1, 5, 20]),
    "evict_during": st.sampled_from(["decode", "prefill", "both"]),
    "evict_when": st.just("always"),  # under pressure: the short pools below
    "theta_f": st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    "batch_size": st.sampled_from([1, 2, 4, 16, 40]),
    "low_watermark_blocks": st.sampled_from([0, 8, 30, 40]),
    "headroom_blocks": st.sampled_from([0, 1, 4, 16]),
    "experiment": st.fixed_dictionaries(
        {},
        optional={
            "planner": st.sampled_from(["plug", "pack"]),
            "round_rule": st.sampled_from(["price", "paper"]),
        },
    ),
    "prefix_sharing": st.sampled_from(["skip", "index", "copy"]),
    "reclamation": st.sampled_from(["auto", "auto", "paused", "off"]),
    "recycle": st.booleans(),
}
CONFIGS = st.fixed_dictionaries(VALUES)
PATCHES = st.fixed_dictionaries({}, optional=VALUES)


def what_if(live: LiveEngine, patch: dict[str, Any]) -> WhatIf:
    result: PatchResult = live.call("patch_config", patch=patch, validate_only=True)
    assert result.what_if is not None
    return result.what_if


@given(
    config=CONFIGS,
    patch=PATCHES,
    num_steps=st.integers(1, 30),
    chunk=st.sampled_from([7, 64]),
    num_blocks=st.sampled_from([40, 64]),
    manual=st.booleans(),
    hole_us=st.sampled_from([0, 1, 20, 10_000]),
)
@settings(
    max_examples=100,
    derandomize=True,
    phases=[Phase.generate],
)
def test_applying_a_change_does_what_was_predicted(
    config: dict[str, Any],
    patch: dict[str, Any],
    num_steps: int,
    chunk: int,
    num_blocks: int,
    manual: bool,
    hole_us: int,
) -> None:
    """A manual round always moves tokens, an automatic one only if the predicted gates are open."""
    with make_engine(
        num_blocks=num_blocks,
        block_size=4,
        concurrency=4,
        prompt_tokens=37,
        prefix_tokens=14,
        max_tokens=60,
        config=config,
    ) as live:
        live.core.prefill_chunk_tokens = chunk
        live.core.worker.hole_us, live.core.worker.copy_us = hole_us, 10
        live.steps(num_steps)
        runtime = live.core.runtime
        predicted = what_if(live, patch)
        live.call("patch_config", patch=patch)
        mode = runtime.config.reclamation
        if manual and mode != "off":
            live.call("compact")
        evicted, held = runtime.counters.tokens.evicted, runtime.tables.pool.num_used
        blocks = {table.request_id: set(table.blocks) for table in runtime.tables}
        runtime.begin_step(live.core.due_requests())
        freed = held - runtime.tables.pool.num_used
        plans = [moving.plan for moving in runtime.relocator.planned.values()]
        moved = sum(plan.num_moved_tokens for plan in plans)
        assert predicted.evicted_tokens == runtime.counters.tokens.evicted - evicted
        is_open = all(gate.open for gate in predicted.gates[: len(CONDITIONS)])
        if not (manual or is_open):
            assert plans == []
            assert runtime.relocator.pressure(ahead=0).steps_since_round > 0
            return
        assert freed == predicted.freed_blocks
        assert moved == predicted.moved_tokens
        assert predicted.moved_bytes == moved * runtime.geometry.bytes_per_token
        assert sum(len(plan.source_blocks) for plan in plans) == predicted.source_blocks
        fresh = {
            block
            for name, flight in runtime.relocator.planned.items()
            for block in set(flight.relocation.destination_blocks) - blocks[name]
        }
        assert len(fresh) == predicted.destination_blocks
        if not manual and runtime.tables.any_virtual:
            assert runtime.relocator.pressure(ahead=0).steps_since_round == 0


@given(
    planner=st.sampled_from(["plug", "pack"]),
    recycle=st.booleans(),
    batch_size=st.integers(1, 3),
    headroom=st.sampled_from([0, 1, 2, 16]),
    sharing=st.sampled_from(["skip", "index", "copy"]),
    prefix=st.sampled_from([0, 14]),
    block_size=st.integers(2, 4),
    budget=st.integers(5, 20),
    num_steps=st.integers(1, 30),
)
@example(
    planner="plug",
    recycle=False,
    batch_size=2,
    headroom=0,
    sharing="index",
    prefix=0,
    block_size=4,
    budget=10,
    num_steps=18,
)
@settings(max_examples=60, derandomize=True, phases=[Phase.explicit, Phase.generate])
def test_round_after_round_frees_what_every_dry_run_promised(
    planner: str,
    recycle: bool,
    batch_size: int,
    headroom: int,
    sharing: str,
    prefix: int,
    block_size: int,
    budget: int,
    num_steps: int,
) -> None:
    """Few sources a round, so that each round works on what the ones before it left."""
    with make_engine(
        num_blocks=160,
        block_size=block_size,
        concurrency=3,
        prompt_tokens=30 + budget,
        prefix_tokens=prefix,
        max_tokens=400,
        config={
            "policy": {"name": "random", "params": {"sinks": 1, "recent": 2}},
            "budget_tokens": budget,
            "evict_when": "always",
            "interval_tokens": 3,
            "reclamation": "paused",
            "experiment": {"planner": planner},
            "recycle": recycle,
            "batch_size": batch_size,
            "headroom_blocks": headroom,
            "prefix_sharing": sharing,
        },
    ) as live:
        live.steps(num_steps)
        live.configure(policy={"name": "none"})
        for _ in range(6):
            tried: Operation = live.call("compact", dry_run=True)
            predicted = what_if(live, {})
            done: Operation = live.call("compact")
            live.steps(1)
            assert tried.plan is not None
            assert done.plan is not None
            assert done.result is not None
            assert done.result.freed_blocks == tried.plan.freed_blocks == done.plan.freed_blocks
            assert done.result.freed_blocks == predicted.freed_blocks


@pytest.fixture
def holes() -> Any:
    config = {"theta_f": 0.9, "low_watermark_blocks": 95, "reclamation": "auto"}
    with make_holes(3, prefix_caching=False, **config) as live:  # its blocks can be written
        yield live


def closed(answer: WhatIf) -> list[str]:
    return [gate.name for gate in answer.gates if not gate.open]


def test_a_change_of_theta_f_alone_shows_in_the_gates(holes: LiveEngine) -> None:
    f = holes.core.runtime.tables.pool.fragmentation
    assert 0.2 < f < 0.8
    assert closed(what_if(holes, {"theta_f": 0.8})) == ["theta_f"]
    assert closed(what_if(holes, {"theta_f": 0.1})) == []
    (gate,) = [g for g in what_if(holes, {"theta_f": 0.1}).gates if g.name == "theta_f"]
    assert gate.detail == f"F {f:.2f} > theta_F 0.10"


def test_each_field_that_a_round_depends_on_shows(holes: LiveEngine) -> None:
    now = what_if(holes, {"theta_f": 0.1})
    assert now.freed_blocks > 2
    assert now.source_blocks > 2
    assert what_if(holes, {"batch_size": 2}).source_blocks == 2
    assert (
        what_if(holes, {"experiment": {"planner": "pack"}, "headroom_blocks": 0}).source_blocks == 0
    )
    assert (
        what_if(holes, {"experiment": {"planner": "plug"}, "headroom_blocks": 0}).source_blocks > 0
    )
    none = what_if(holes, {"experiment": {"planner": "pack"}, "headroom_blocks": 0})
    assert (none.source_blocks, closed(none)) == (0, ["theta_f", "headroom"])
    assert none.deferred_reason is not None
    assert closed(what_if(holes, {"low_watermark_blocks": 0, "theta_f": 0.1})) == ["watermark"]
    paused = what_if(holes, {"reclamation": "paused", "theta_f": 0.1})
    assert (closed(paused), paused.freed_blocks) == (["reclamation"], now.freed_blocks)


def test_the_gates_are_those_after_the_evictions_of_the_change(holes: LiveEngine) -> None:
    """F rises with the tokens that a smaller budget would evict, and the gate has its value."""
    f = holes.core.runtime.tables.pool.fragmentation
    answer = what_if(holes, {"budget_tokens": 3, "interval_tokens": 0, "theta_f": f + 0.01})
    assert answer.evicted_tokens > 0
    assert closed(answer) == []
    assert "theta_f" in closed(what_if(holes, {"theta_f": f + 0.01}))


def test_evictions_that_wait_for_scores_are_reported_and_happen(holes: LiveEngine) -> None:
    runtime = holes.core.runtime
    patch = {"policy": {"name": "h2o"}, "budget_tokens": 8, "interval_tokens": 0}
    due = sum(table.num_live - 8 for table in runtime.tables)
    predicted = what_if(holes, patch)
    assert (predicted.evicted_tokens, predicted.waiting_tokens) == (0, due)
    evicted = runtime.counters.tokens.evicted
    holes.call("patch_config", patch=patch)
    holes.steps(60)
    assert runtime.counters.tokens.evicted - evicted >= due
    assert what_if(holes, {"budget_tokens": 9}).waiting_tokens == 0


def test_a_dry_run_is_computed_again_only_after_something_changed(holes: LiveEngine) -> None:
    """Each of the changes may be one that only the worker, a request or vLLM makes."""
    patch = {"budget_tokens": 8}
    seen = [what_if(holes, patch)]

    def is_new() -> bool:
        found = what_if(holes, patch)
        assert what_if(holes, patch) is found
        seen.append(found)
        return all(found is not one for one in seen[:-1])

    other = what_if(holes, {"budget_tokens": 9})
    assert not is_new()
    assert what_if(holes, {"budget_tokens": 9}) is other
    holes.call("status")
    assert not is_new()
    holes.steps(1)
    assert is_new()
    holes.core.store.take(1)
    assert is_new()
    holes.runtime.finish_step(None, holes.runtime.step)
    assert is_new()
    holes.core.remove(holes.core.running[0].id)
    assert is_new()
    holes.call("patch_config", patch={"headroom_blocks": 4})
    assert is_new()


def test_a_compaction_is_planned_again_only_after_something_changed(
    holes: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = []
    preview = holes.runtime.round_planner.preview

    def counted(*args: Any, **kwargs: Any) -> Any:
        rounds.append(preview(*args, **kwargs))
        return rounds[-1]

    monkeypatch.setattr(holes.runtime.round_planner, "preview", counted)
    tried = [holes.call("compact", dry_run=True) for _ in range(3)]
    assert len(rounds) == 1
    assert tried[0].plan == tried[1].plan == tried[2].plan
    assert len({operation.id for operation in tried}) == 3
    holes.call("compact", dry_run=True, batch_size=1)
    holes.call("compact", dry_run=True, request_id=holes.core.running[0].id)
    assert len(rounds) == 3


# ---------------------------------------------------------------- under pressure


def next_step(live: LiveEngine, patch: dict[str, Any]) -> tuple[int, int]:
    """Tokens that die and blocks that become free in the next step under `patch`."""
    runtime = live.core.runtime
    live.call("patch_config", patch=patch)
    evicted, held = runtime.counters.tokens.evicted, runtime.tables.pool.num_used
    runtime.begin_step(live.core.due_requests())
    return runtime.counters.tokens.evicted - evicted, held - runtime.tables.pool.num_used


@pytest.mark.parametrize(
    "patch",
    [{}, {"batch_size": 2}, {"budget_tokens": 40}, {"policy": {"name": "random"}}],
    ids=str,
)
def test_what_would_be_given_for_the_shortage_of_this_moment_is_given(
    patch: dict[str, Any],
) -> None:
    seen = []
    for num_steps in range(2, 60, 3):
        live = make_pressed()
        live.steps(num_steps)
        predicted = what_if(live, patch)
        found = next_step(live, patch)
        live.close()
        assert found == (predicted.evicted_tokens, predicted.freed_blocks)
        assert not (predicted.evicted_tokens and predicted.short_blocks == 0)
        seen.append(predicted.evicted_tokens)
    if patch.get("budget_tokens", 0) < 40:
        assert 0 < sum(map(bool, seen)) < len(seen)


def test_a_smaller_floor_costs_nothing_while_no_block_is_short() -> None:
    live = make_pressed(3)
    live.steps(20)
    lower, same = what_if(live, {"budget_tokens": 8}), what_if(live, {})
    assert (lower.evicted_tokens, lower.short_blocks, lower.freed_blocks) == (0, 0, 0)
    assert lower.givable_tokens > same.givable_tokens > 0
    assert lower.givable_blocks > same.givable_blocks > 0
    assert lower.more_requests is not None
    assert same.more_requests is not None
    assert lower.more_requests > same.more_requests
    fixed = what_if(live, {"evict_when": "always"})
    assert fixed.evicted_tokens > 0
    assert (fixed.givable_tokens, fixed.givable_blocks) == (0, 0)
    live.close()


def test_what_can_be_given_is_what_the_status_says_after_the_change() -> None:
    live = make_pressed()
    live.steps(30)
    for floor in (12, 24, 30):
        predicted = what_if(live, {"budget_tokens": floor})
        live.configure(budget_tokens=floor)
        live.runtime.requests.begin_step()  # the rules of the new configuration are in force
        pressure = live.reporter.status().pressure
        assert pressure is not None
        assert (predicted.givable_tokens, predicted.givable_blocks) == (
            pressure.givable_tokens,
            pressure.givable_blocks,
        )
    live.close()


def test_a_floor_under_which_a_waiting_request_fits_is_given_for() -> None:
    live = make_pressed(0)
    for i in range(4):
        live.admit(f"r{i}", 30, max_tokens=16)
    live.configure(budget_tokens=40)
    live.steps(1)
    live.admit("large", 150, max_tokens=20)
    live.steps(4)
    assert what_if(live, {}).evicted_tokens == 0  # it does not fit even then
    lower = what_if(live, {"budget_tokens": 8})
    assert lower.short_blocks > 0
    assert lower.evicted_tokens > 0
    patient = what_if(live, {"budget_tokens": 8, "evict_after_wait_ms": 3_600_000})
    assert patient.evicted_tokens == 0
    live.call("patch_config", patch={"budget_tokens": 8})
    live.steps(4)
    assert any(request.id == "large" for request in live.core.running)
    live.close()


def test_what_waits_for_scores_under_pressure_is_not_called_evicted() -> None:
    live = make_pressed()
    for _ in range(60):
        live.steps(1)
        now = what_if(live, {})
        if now.evicted_tokens:
            break
    later = what_if(live, {"policy": {"name": "h2o"}})
    assert (later.evicted_tokens, later.waiting_tokens) == (0, now.evicted_tokens)
    live.close()


@pytest.mark.parametrize("floor", [16, 24, 48])
@pytest.mark.parametrize("prompt", [20, 80])
@pytest.mark.parametrize("when", ["pressure", "always"])
def test_as_many_more_requests_run_as_would_fit(when: str, prompt: int, floor: int) -> None:
    """Under pressure more may run: those that run can be cut down again for the next."""
    live = make_pressed(0, num_blocks=129)
    for i in range(3):
        live.admit(f"r{i}", prompt, max_tokens=200)
    live.steps(12)
    patch = {"budget_tokens": floor, "evict_when": when}
    predicted = what_if(live, patch).more_requests
    assert predicted is not None
    live.call("patch_config", patch=patch)
    for i in range(40):
        live.admit(f"n{i}", prompt, max_tokens=200)
    most = 0
    for _ in range(60):
        live.steps(1)
        most = max(most, len(live.core.running) - 3)
    counters = live.core.runtime.counters
    live.close()
    assert counters.requests.finished == counters.requests.preempted == 0
    assert predicted == most if when == "always" else predicted <= most <= predicted + 2


def test_no_number_of_requests_is_promised_where_nothing_is_evicted() -> None:
    live = make_pressed(3, policy={"name": "none"})
    live.steps(3)
    assert what_if(live, {}).more_requests is None
    assert what_if(live, {"policy": {"name": "random"}}).more_requests is not None
    live.close()
