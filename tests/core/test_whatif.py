"""Dry runs are exact: in any state, applying the change does what the dry run predicted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.core.harness import LiveEngine, make_engine
from vtoken.planning.gates import CONDITIONS
from vtoken.wire import PatchResult, WhatIf

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
    "theta_f": st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    "batch_size": st.sampled_from([1, 2, 4, 16, 40]),
    "low_watermark_blocks": st.sampled_from([0, 8, 30, 40]),
    "headroom_blocks": st.sampled_from([0, 1, 4, 16]),
    "planner": st.sampled_from(["plug", "pack"]),
    "round_rule": st.sampled_from(["price", "paper"]),
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
    live = make_engine(
        num_blocks=num_blocks,
        block_size=4,
        concurrency=4,
        prompt_tokens=37,
        prefix_tokens=14,
        max_tokens=60,
        config=config,
    )
    try:
        live.core.prefill_chunk_tokens = chunk
        live.core.worker.hole_us, live.core.worker.copy_us = hole_us, 10
        live.steps(num_steps)
        runtime = live.core.runtime
        predicted = what_if(live, patch)
        live.call("patch_config", patch=patch)
        mode = runtime.config.reclamation
        if manual and mode != "off":
            live.call("compact")
        evicted, held = runtime.counters.evicted_tokens, runtime.tables.pool.num_used
        blocks = {table.request_id: set(table.blocks) for table in runtime.tables}
        runtime.begin_step(live.core.due_requests())
        freed = held - runtime.tables.pool.num_used
        plans = [bound for bound, _ in runtime.relocator.planned.values()]
        moved = sum(plan.num_moved_tokens for plan in plans)
        assert predicted.evicted_tokens == runtime.counters.evicted_tokens - evicted
        is_open = all(gate.open for gate in predicted.gates[: len(CONDITIONS)])
        if not (manual or is_open):
            assert plans == []
            assert runtime.relocator._last_round_step < runtime.step
            return
        assert freed == predicted.freed_blocks
        assert moved == predicted.moved_tokens
        assert sum(len(plan.source_blocks) for plan in plans) == predicted.source_blocks
        fresh = {
            block
            for name, (_, flight) in runtime.relocator.planned.items()
            for block in set(flight.relocation.destination_blocks) - blocks[name]
        }
        assert len(fresh) == predicted.destination_blocks
        if not (manual or runtime.idle):
            assert runtime.relocator._last_round_step == runtime.step
    finally:
        live.close()


@pytest.fixture
def holes() -> Any:
    live = make_engine(
        num_blocks=96,
        block_size=4,
        concurrency=3,
        prompt_tokens=40,
        prefix_tokens=0,
        max_tokens=400,
        config={
            "policy": {"name": "random", "params": {"recent": 1, "sinks": 0}},
            "budget_tokens": 16,
            "interval_tokens": 4,
            "theta_f": 0.9,
            "low_watermark_blocks": 95,
            "recycle": False,
            "headroom_blocks": 8,
        },
    )
    live.core.prefix_caching = False  # its blocks could not be written
    live.steps(5)
    yield live
    live.close()


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
    assert what_if(holes, {"planner": "pack", "headroom_blocks": 0}).source_blocks == 0
    assert what_if(holes, {"planner": "plug", "headroom_blocks": 0}).source_blocks > 0
    none = what_if(holes, {"planner": "pack", "headroom_blocks": 0})
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
    evicted = runtime.counters.evicted_tokens
    holes.call("patch_config", patch=patch)
    holes.steps(60)
    assert runtime.counters.evicted_tokens - evicted >= due
    assert what_if(holes, {"budget_tokens": 9}).waiting_tokens == 0
