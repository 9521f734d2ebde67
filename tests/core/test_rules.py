"""The seven rules of block writes, sharing and preemption. `tests/faults` breaks each rule that can
be broken from outside; controls here show that a test can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.core.harness import CoreEngine, SimulatedWorker
from tests.support.core.request_step import part_of, parts_of
from tests.support.core.tables import evict_tokens, hole_of, sync_new_tokens
from vtoken.base.errors import InvariantViolation
from vtoken.core.protocol.step import WorkerReport
from vtoken.policies.signals import Signal

SUM = Signal("attention_sum", layers=(2,))  # of the 4 layers of a `CoreEngine`
EAGER: dict[str, Any] = {"theta_f": 0.0, "headroom_blocks": 4}


def crowd(
    policy: str = "random", *, num_requests: int = 5, num_blocks: int = 32, **options: Any
) -> CoreEngine:
    """Requests that share a hashed prefix and evict inside it."""
    params = {"recent": 2, "sinks": 1} if policy == "random" else {}
    config = {
        "policy": {"name": policy, "params": params},
        "budget_tokens": 10,
        "evict_when": "always",
        "interval_tokens": 1,
        "low_watermark_blocks": num_blocks,
    } | EAGER
    config |= options.pop("config", {})
    engine = CoreEngine(num_blocks=num_blocks, block_size=4, config=config, **options)
    for i in range(num_requests):
        engine.add(f"r{i}", 19, prefix="p", prefix_tokens=9, max_tokens=40, seed=i)
    return engine


# ---------------------------------------------------------------- rule 1: write to private blocks


@pytest.mark.parametrize("policy", ["random", "streaming_llm", "sliding_window", "h2o"])
@pytest.mark.parametrize("recycle", [True, False])
@pytest.mark.parametrize("planner", ["plug", "pack"])
def test_rule_1_only_private_unhashed_blocks_are_written(
    policy: str, recycle: bool, planner: str
) -> None:
    engine = crowd(policy, config={"recycle": recycle, "experiment": {"planner": planner}})
    engine.run(120)
    assert engine.runtime.counters.tokens.evicted > 0
    assert engine.runtime.counters.reclamation.relocations > 0
    assert engine.worker.reads_checked > 1000


def test_rule_1_append_skips_the_rest_of_a_read_only_block() -> None:
    """The newest tokens are in recycled holes, so the tail dies and E moves into a hashed block."""
    engine = CoreEngine(
        num_blocks=16,
        block_size=4,
        config={"policy": {"name": "sliding_window"}, "reclamation": "off", "recycle": False},
    )
    engine.add("a", 9)
    engine.step()
    table = engine.runtime.tables["a"]
    evict_tokens(engine.runtime.tables, "a", np.array([6, 7, 8]))
    table.protect(())
    tables = engine.runtime.tables
    assert (table.extent, tables.choose_places(recycling=False).start) == (6, [6])
    table.protect(table.blocks[:2])
    assert tables.choose_places(recycling=False).start == [8]
    engine.runtime.appender.choose_places()
    assert engine.runtime.required_extent("a", 10) == 9


# ---------------------------------------------------------------- rule 2: ref_cnt at plan time


def deny_sharing(engine: CoreEngine) -> CoreEngine:
    """The planner gets no block as shared."""
    planner = engine.runtime.round_planner
    honest = planner._layout_of

    def layout_of(table: Any, *args: Any) -> Any:
        layout = honest(table, *args)
        return replace(layout, movable=np.ones_like(layout.movable))

    planner._layout_of = layout_of  # type: ignore[method-assign]
    return engine


def test_rule_2_blocks_shared_since_the_same_step_are_never_sources_or_destinations() -> None:
    """All are admitted in one step: the first one's blocks are hashed and shared within it."""
    engine = crowd()
    engine.step()
    assert {b for b in range(32) if engine.store.ref_cnt[b] == 5}
    for _ in range(40):
        held_by_many = {b for b in range(32) if engine.store.ref_cnt[b] > 1}
        plan = engine.step()
        assert not held_by_many & set((plan.source_slots // 4).tolist())
        assert not held_by_many & set((plan.destination_slots // 4).tolist())


def test_rule_2_control_a_planner_that_is_denied_sharing_is_caught_by_the_pool() -> None:
    """The round frees fewer blocks than it promised: another request still reads the others."""
    with pytest.raises(InvariantViolation, match="promised to free"):
        deny_sharing(crowd()).run(120)


def test_rule_2_control_a_planner_that_is_denied_sharing_makes_them_sources() -> None:
    engine = deny_sharing(crowd())
    engine.runtime.current.strict = False
    moved: set[int] = set()
    for _ in range(40):
        held_by_many = {b for b in range(32) if engine.store.ref_cnt[b] > 1}
        moved |= held_by_many & set((engine.step().source_slots // 4).tolist())
    assert moved


# ---------------------------------------------------------------- rule 3: free after all plans


def test_rule_3_no_block_freed_in_a_pass_is_a_destination_of_that_pass() -> None:
    engine = crowd(config={"experiment": {"planner": "pack"}}, num_blocks=24)
    taken: list[int] = []
    returned: list[int] = []
    take, give_back = engine.store.take, engine.store.give_back

    def recording_take(num_blocks: int) -> list[int]:
        taken.extend(blocks := take(num_blocks))
        return blocks

    def recording_give_back(blocks: Sequence[int]) -> None:
        returned.extend(blocks)
        give_back(blocks)

    begin = engine.runtime.begin_step

    def begin_step(ready: Any) -> None:
        taken.clear()
        returned.clear()
        engine.store.take, engine.store.give_back = recording_take, recording_give_back  # type: ignore[method-assign]
        try:
            begin(ready)
        finally:
            engine.store.take, engine.store.give_back = take, give_back  # type: ignore[method-assign]
        assert not set(taken) & set(returned)

    engine.runtime.begin_step = begin_step  # type: ignore[method-assign]
    engine.run(120)
    assert engine.runtime.counters.reclamation.relocations > 0


def scattered(worker: SimulatedWorker | None = None) -> CoreEngine:
    """Three requests whose holes are everywhere, nothing reclaimed yet."""
    engine = CoreEngine(
        num_blocks=24,
        block_size=4,
        config={
            "policy": {"name": "random", "params": {"recent": 1, "sinks": 0}},
            "budget_tokens": 8,
            "evict_when": "always",
            "interval_tokens": 0,
            "experiment": {"planner": "pack"},
            "headroom_blocks": 8,
            "reclamation": "paused",
            "recycle": False,
        },
        worker=worker,
    )
    for i in range(3):
        engine.add(f"r{i}", 20, seed=i)
    engine.run(2)
    return engine


def test_rule_3_all_copies_of_a_step_are_one_gather_then_one_scatter() -> None:
    """Two tokens of one block swap places with each other's holes: order must not matter."""
    worker = SimulatedWorker(8, 4)
    worker.memory[:8] = list("abcdefgh")
    engine = scattered(worker=SimulatedWorker(24, 4))
    plan = engine.step()
    plan.source_slots, plan.destination_slots = np.array([0, 1]), np.array([1, 2])
    worker.copy_slots(plan)
    assert worker.memory[:3] == ["a", "a", "b"]


def test_rule_3_control_sequential_copies_overwrite_a_source() -> None:
    worker = SimulatedWorker(8, 4)
    worker.memory[:8] = list("abcdefgh")
    worker.sequential_copies = True
    plan = scattered().step()
    plan.source_slots, plan.destination_slots = np.array([0, 1]), np.array([1, 2])
    worker.copy_slots(plan)
    assert worker.memory[:3] == ["a", "a", "a"]


# ---------------------------------------------------------------- rule 4: never cache again


def test_rule_4_no_block_is_hashed_after_the_first_eviction() -> None:
    engine = crowd(num_requests=1)
    engine.step()
    assert not engine.runtime.tables["r0"].virtual  # its blocks may be hashed
    hashes = len(engine.store.cached)
    engine.run(30)
    assert engine.runtime.tables["r0"].virtual
    assert len(engine.store.cached) <= hashes


# ---------------------------------------------------------------- rule 5: preemption resets


def test_rule_5_a_preempted_request_starts_again_with_every_token_and_says_so() -> None:
    engine = crowd(num_requests=1)
    engine.run(12)
    dead = engine.runtime.tables["r0"].num_dead
    num_tokens = engine.runtime.tables["r0"].num_tokens
    assert dead > 0
    engine.preempt_newest()
    assert "r0" not in engine.runtime.tables
    event = engine.runtime.events.page(0, 1000).events[-1]
    assert event.kind == "preemption"
    assert event.data == {
        "request_id": "r0",
        "recomputed_tokens": num_tokens,
        "dead_tokens_restored": dead,
        "swapped_tokens": 0,
        "obstacle": "",
    }
    engine.run(1)
    table = engine.runtime.tables["r0"]
    assert (table.num_live, table.virtual) == (num_tokens + 1, False)
    engine.run(20)


# ---------------------------------------------------------------- rule 6: several tokens, in order


def test_rule_6_one_token_fills_a_hole_and_several_go_to_the_end_in_order() -> None:
    engine = CoreEngine(num_blocks=16, block_size=4, config=EAGER)
    engine.add("a", 10)
    engine.step()
    table = engine.runtime.tables["a"]
    tables, blocks = engine.runtime.tables, [*table.blocks, 9]
    evict_tokens(tables, "a", np.array([1, 2, 5]))
    table.protect(())
    tables.choose_places(recycling=True)
    assert hole_of(tables, "a") == 1
    places = sync_new_tokens(tables, "a", blocks, 13)
    assert places.tolist() == [blocks[2] * 4 + 2, blocks[2] * 4 + 3, 9 * 4]
    assert sync_new_tokens(tables, "a", blocks, 14).tolist() == [blocks[0] * 4 + 1]
    table.check()


# ---------------------------------------------------------------- rule 7: undo the unscheduled


def test_rule_7_the_plan_of_a_request_preempted_in_the_same_step_is_dropped() -> None:
    engine = scattered()
    engine.runtime.operations.add("test", None, 24, False)
    schedule = engine.schedule_running

    def preempt_the_last(request: Any, *rest: Any) -> None:
        if request.id == "r0":
            engine.preempt(engine.running[-1])
        schedule(request, *rest)

    engine.schedule_running = preempt_the_last  # type: ignore[method-assign,assignment]
    plan = engine.step()
    engine.schedule_running = schedule  # type: ignore[method-assign]
    assert set(plan.requests.names) == {"r0", "r1"}
    relocated = [
        e.data for e in engine.runtime.events.page(0, 1000).events if e.kind == "relocation"
    ]
    assert {r["request_id"] for r in relocated} == {"r0", "r1"}
    assert sum(r["moved_tokens"] for r in relocated) == len(plan.source_slots)
    engine.run(20)


def test_rule_7_a_relocated_request_that_is_not_scheduled_keeps_its_contents() -> None:
    """Its part of the plan has no new tokens; the worker's mirror is still updated."""
    engine = scattered()
    engine.runtime.operations.add("test", None, 24, False)
    schedule = engine.schedule_running

    def skip_r1(request: Any, *rest: Any) -> None:
        if request.id != "r1":
            schedule(request, *rest)

    engine.schedule_running = skip_r1  # type: ignore[method-assign,assignment]
    plan = engine.step()
    engine.schedule_running = schedule  # type: ignore[method-assign]
    assert len(part_of(plan.requests, "r1").new_slots) == 0
    assert len(part_of(plan.requests, "r1").moved_ids) > 0
    engine.check()
    engine.run(20)


def test_i4_a_request_has_one_relocation_in_flight() -> None:
    """The report of a step comes one step late; meanwhile the request is left alone."""
    engine = scattered()
    engine.worker_lag_steps = 1
    engine.runtime.active.config = replace(
        engine.runtime.config,
        reclamation="auto",
        theta_f=0.0,
        low_watermark_blocks=24,
        batch_size=2,
        experiment=replace(engine.runtime.config.experiment, planner="plug"),
    )
    steps: dict[str, list[int]] = {}
    for _ in range(40):
        plan = engine.step()
        engine.check()
        for name, part in parts_of(plan.requests).items():
            if len(part.moved_ids):
                steps.setdefault(name, []).append(plan.step)
    assert max(len(moved) for moved in steps.values()) > 2
    assert all(b - a > 1 for moved in steps.values() for a, b in pairwise(moved))


def test_scores_of_an_earlier_admission_are_not_believed() -> None:
    """The report of a step before the preemption arrives after the request is back."""
    engine = crowd("h2o", num_requests=1)
    engine.run(2)
    stale = WorkerReport(engine.runtime.step, scores={("r0", SUM): np.ones(3, dtype=np.float32)})
    engine.preempt_newest()
    engine.run(1)
    known = engine.runtime.requests.held["r0"].scores_of(SUM)
    engine.runtime.finish_step(stale, stale.step)
    assert engine.runtime.requests.held["r0"].scores_of(SUM) is known


# ---------------------------------------------------------------- borrowed blocks


def test_lent_blocks_hold_nothing_that_is_read_or_cached() -> None:
    """Naive-evict, so holes stay; requests return to a prefix without holders meanwhile."""
    engine = crowd(num_requests=2, config={"reclamation": "off"})
    for wave in range(4):
        engine.run(60)
        for i in range(2):
            engine.add(f"w{wave}-{i}", 19, prefix="p", prefix_tokens=9, max_tokens=40, seed=i)
    engine.run(120)
    assert engine.worker.blocks_borrowed > 0
