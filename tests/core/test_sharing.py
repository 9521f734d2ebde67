"""Shared prefix blocks in three tiers: skipped, dropped when all dead, or emptied by all their
holders at once; never written, and never freed while a request reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.test_planner import next_takes_block
from tests.core.test_rules import deny_sharing
from tests.support.core.harness import CoreEngine
from tests.support.core.tables import evict_tokens, sync_new_tokens
from vtoken.base.errors import InvariantViolation
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.planner import Layout, RelocationPlan
from vtoken.core.planning.round import Round, plan_round
from vtoken.core.planning.sharing import plan_groups
from vtoken.core.tables.token_tables import TokenTables
from vtoken.wire import Experiment, PlannerName

PLANNERS: list[PlannerName] = ["pack", "plug"]
TIERS = ["skip", "index", "copy"]
Grid = list[list[int]]


@dataclass
class Pool:
    """Requests over one pool: `grids[h]` [n, S] ids by place, `tables[h]` the blocks by rank."""

    grids: list[npt.NDArray[np.int64]]
    tables: list[list[int]]
    num_blocks: int
    recycles: bool = True

    @property
    def size(self) -> int:
        return int(self.grids[0].shape[1])

    @property
    def holders(self) -> npt.NDArray[np.uint16]:
        count = np.zeros(self.num_blocks, dtype=np.uint16)
        for table in self.tables:
            count[table] += 1
        return count

    def layouts(self, which: Sequence[int] | None = None) -> list[Layout]:
        shared = self.holders > 1
        return [
            Layout(
                f"r{h}",
                np.array(self.tables[h], dtype=np.int64),
                self.grids[h],
                movable=~shared[self.tables[h]],
                writable=~shared[self.tables[h]],
                recycles=self.recycles,
            )
            for h in (range(len(self.tables)) if which is None else which)
        ]

    def plan(
        self, planner: PlannerName, batch_size: int = 99, headroom: int = 99
    ) -> list[RelocationPlan]:
        """The groups alone."""
        layouts = self.layouts()
        plans, _ = plan_groups(
            layouts,
            [None] * len(layouts),
            self.holders,
            planner,
            batch_size=batch_size,
            headroom_blocks=headroom,
        )
        return plans

    def round(self, planner: PlannerName, batch_size: int = 99, headroom: int = 99) -> Round:
        return plan_round(
            self.layouts(),
            VTokenConfig(experiment=Experiment(planner=planner), prefix_sharing="copy"),
            holders=self.holders,
            batch_size=batch_size,
            headroom_blocks=headroom,
        )

    def tokens(self) -> TokenTables:
        """Real token tables in this state; ids are places."""
        tables = TokenTables(self.num_blocks + 64, self.size)
        for h, (grid, blocks) in enumerate(zip(self.grids, self.tables, strict=True)):
            sync_new_tokens(tables, f"r{h}", blocks, grid.size)
            evict_tokens(tables, f"r{h}", np.flatnonzero(grid.ravel() < 0))
        return tables


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """2 to 4 requests, each holding some of 6 shared blocks and 0 to 4 blocks of its own."""
    size = draw(st.integers(1, 4))
    num_requests = draw(st.integers(2, 4))
    holds = draw(
        st.lists(
            st.sets(st.integers(0, num_requests - 1), min_size=2),
            min_size=1,
            max_size=6,
        )
    )
    density = draw(st.sampled_from([0.2, 0.5, 0.8]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    grids, tables = [], []
    next_block = 1 + len(holds)
    for h in range(num_requests):
        own = draw(st.integers(0, 4))
        table = [1 + b for b, who in enumerate(holds) if h in who]
        table += range(next_block, next_block + own)
        next_block += own
        if not table:
            table = [next_block]
            next_block += 1
        place = np.arange(len(table) * size, dtype=np.int64)
        live = rng.random(len(place)) < density
        live[-1] = True  # the newest token
        grids.append(np.where(live, place, -1).reshape(len(table), size))
        tables.append(table)
    return Pool(grids, tables, next_block, recycles=draw(st.booleans()))


def apply(tables: TokenTables, plans: Sequence[RelocationPlan], first_fresh: int, size: int) -> int:
    """Apply `plans`; returns the net number of blocks freed in the pool."""
    used = tables.pool.num_used
    for plan in plans:
        fresh = list(range(first_fresh, first_fresh + plan.num_fresh_blocks))
        first_fresh += plan.num_fresh_blocks
        bound = plan.bind(fresh, size)
        before = len(tables[plan.request_id].blocks)
        tables.apply_moves(
            plan.request_id, bound.token_ids, bound.destination_slots, bound.blocks.tolist()
        )
        assert before - len(tables[plan.request_id].blocks) == plan.num_shed_blocks
    tables.check()
    return used - tables.pool.num_used


@given(pools(), st.sampled_from(PLANNERS), st.integers(1, 12), st.integers(0, 8))
@settings(max_examples=400)
def test_every_group_is_bounded_profitable_and_frees_what_it_promises(
    pool: Pool, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    found = pool.round(planner, batch_size, headroom)
    plans = found.plans
    requests = [plan.request_id for plan in plans]
    assert len(set(requests)) == len(requests)
    assert sum(len(plan.source_blocks) for plan in plans) <= batch_size
    assert sum(plan.num_fresh_blocks for plan in plans) <= headroom
    emptied = {block for plan in plans for block in plan.shared_blocks}
    for block in emptied:  # by all of its holders, or by none
        leaving = {plan.request_id for plan in plans if block in plan.source_blocks}
        holding = {f"r{h}" for h, table in enumerate(pool.tables) if block in table}
        assert leaving == holding
    shared = set(np.flatnonzero(pool.holders > 1).tolist())
    for plan in plans:
        assert plan.num_shed_blocks > 0
        assert set(plan.source_blocks) & shared == set(plan.shared_blocks)
        held = {slot // pool.size for slot in plan.destination_slots.tolist() if slot >= 0}
        assert not held & shared
        if planner == "pack":
            assert not held
    promised = found.num_freed_blocks
    assert all(plan.num_freed_blocks >= 0 for plan in plans)
    assert (promised > 0) == bool(plans)
    assert apply(pool.tokens(), plans, pool.num_blocks, pool.size) == promised


@given(pools(), st.sampled_from(PLANNERS), st.integers(1, 12), st.integers(0, 8))
@settings(max_examples=400)
def test_the_next_tokens_do_not_take_the_gain_back(
    pool: Pool, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    """`retaken_blocks` counts the blocks that the plans, groups included, make next tokens take."""
    tables, shared = pool.tokens(), np.flatnonzero(pool.holders > 1)
    readonly = frozenset(shared.tolist())
    before = [next_takes_block(tables, t.request_id, readonly, pool.recycles) for t in tables]
    plans = pool.round(planner, batch_size, headroom).plans
    freed = apply(tables, plans, pool.num_blocks, pool.size)
    after = [next_takes_block(tables, t.request_id, readonly, pool.recycles) for t in tables]
    again = sum(max(0, now - then) for then, now in zip(before, after, strict=True))
    assert sum(plan.retaken_blocks for plan in plans) == again
    assert all(plan.retaken_blocks >= 0 for plan in plans)
    assert not plans or freed > again


@given(pools(), st.sampled_from(PLANNERS), st.integers(0, 3))
@settings(max_examples=200)
def test_a_block_whose_holder_may_not_move_stays(
    pool: Pool, planner: PlannerName, absent: int
) -> None:
    """The absent one has a relocation in flight, has not evicted, or has no excess blocks."""
    which = [h for h in range(len(pool.tables)) if h != absent % len(pool.tables)]
    plans, _ = plan_groups(
        pool.layouts(which),
        [None] * len(which),
        pool.holders,
        planner,
        batch_size=99,
        headroom_blocks=99,
    )
    emptied = {block for plan in plans for block in plan.source_blocks}
    assert not emptied & set(pool.tables[absent % len(pool.tables)])


# ---------------------------------------------------------------- hand-worked cases


THIN = [[0, -1, -1, -1], [4, -1, -1, -1], [8, -1, -1, -1]]
FULL = [[12, 13, 14, 15]]


def two(shared: tuple[Grid, Grid], own: tuple[Grid, Grid]) -> Pool:
    """Two requests with the same shared blocks 1.., and blocks of their own."""
    n = len(shared[0])
    grids = [np.array(shared[h] + own[h], dtype=np.int64) for h in (0, 1)]
    first = [*range(1, n + 1), *range(n + 1, n + 1 + len(own[0]))]
    second = [*range(1, n + 1), *range(first[-1] + 1, first[-1] + 1 + len(own[1]))]
    return Pool(grids, [first, second], second[-1] + 1)


def test_pack_copies_when_the_copies_take_fewer_blocks_than_they_free() -> None:
    plans = two((THIN, THIN), (FULL, FULL)).plan("pack")
    assert [plan.num_fresh_blocks for plan in plans] == [1, 1]
    assert [plan.num_shed_blocks for plan in plans] == [2, 2]
    assert [plan.num_freed_blocks for plan in plans] == [0, 1]  # 3 blocks freed, 2 taken
    assert [plan.shared_blocks for plan in plans] == [(1, 2, 3)] * 2


def test_as_many_copies_as_blocks_are_no_gain() -> None:
    """Two holders with half of two blocks each: two blocks freed, two taken."""
    half = [[0, 1, -1, -1], [4, 5, -1, -1]]
    assert two((half, half), ([[8, 9, 10, 11]], [[8, 9, 10, 11]])).plan("pack") == []


def test_a_holder_that_would_not_shrink_keeps_its_block_for_all() -> None:
    """The third request holds only the emptiest block and would take a fresh one for it."""
    shared = [[0, -1, -1, -1], [4, 5, -1, -1], [8, 9, -1, -1]]
    spare = [[12, -1, -1, -1], [16, -1, -1, -1], [20, -1, -1, -1]]
    pool = two((shared, shared), (spare, spare))
    pool.grids.append(np.array([[0, -1, -1, -1], [4, 5, 6, 7]], dtype=np.int64))
    pool.tables.append([1, pool.num_blocks])
    pool.num_blocks += 1
    assert [plan.shared_blocks for plan in pool.plan("plug")] == [(2, 3), (2, 3)]
    pool.grids[2][1] = [4, -1, -1, -1]
    assert [plan.shared_blocks for plan in pool.plan("plug")] == [(1, 2, 3), (1, 2, 3), (1,)]


def test_holes_of_private_blocks_take_the_copies_before_fresh_blocks_do() -> None:
    shared = [[0, 1, -1, -1]]
    own = [[4, -1, -1, -1], [-1, 9, -1, -1]]
    plans = two((shared, shared), (own, own)).plan("plug", headroom=0)
    assert [plan.num_moved_tokens for plan in plans] == [2, 2]
    assert sum(plan.num_freed_blocks for plan in plans) == 1


def test_the_emptiest_blocks_go_first_when_b_is_short() -> None:
    shared = [[0, 1, 2, -1], [4, -1, -1, -1]]
    own = [[8, -1, -1, -1], [12, -1, -1, -1]]
    plans = two((shared, shared), (own, own)).plan("plug", batch_size=2)
    assert [plan.shared_blocks for plan in plans] == [(2,), (2,)]  # one source a holder


def test_missing_headroom_is_counted() -> None:
    pool = two((THIN, THIN), (FULL, FULL))
    plans, missing = plan_groups(
        pool.layouts(), [None] * 2, pool.holders, "pack", batch_size=99, headroom_blocks=1
    )
    assert (plans, missing) == ([], 1)


def test_control_a_group_that_ignores_a_holder_loses_blocks() -> None:
    """Three holders; the third is denied. The plans promise a gain, the pool has a loss."""
    pool = two((THIN, THIN), (FULL, FULL))
    pool.grids.append(pool.grids[0])
    pool.tables.append([1, 2, 3, pool.num_blocks])
    pool.num_blocks += 1
    assert pool.plan("pack") == []  # 3 freed, 3 taken
    plans, _ = plan_groups(
        pool.layouts([0, 1]),
        [None] * 2,
        pool.holders - 1,
        "pack",
        batch_size=99,
        headroom_blocks=99,
    )
    assert sum(plan.num_freed_blocks for plan in plans) == 1
    assert apply(pool.tokens(), plans, pool.num_blocks, pool.size) == -2


# ---------------------------------------------------------------- in the engine


def sharers(
    tier: str,
    *,
    num_requests: int = 3,
    policy: str = "random",
    **config: Any,
) -> CoreEngine:
    """Requests with a common prefix of twelve blocks, of which each keeps a few tokens."""
    params = {"random": {"recent": 2, "sinks": 1}, "streaming_llm": {"sinks": 2}}
    values: dict[str, Any] = {
        "policy": {"name": policy, "params": params.get(policy, {})},
        "budget_tokens": 8,
        "evict_when": "always",
        "interval_tokens": 2,
        "theta_f": 0.0,
        "low_watermark_blocks": 64,
        "headroom_blocks": 16,
        "batch_size": 63,
        "recycle": False,
        "prefix_sharing": tier,
    }
    engine = CoreEngine(num_blocks=64, block_size=4, config=values | config)
    for i in range(num_requests):
        engine.add(f"r{i}", 58, prefix="p", prefix_tokens=48, seed=i)
    return engine


def prefix_blocks(engine: CoreEngine) -> list[int]:
    """The prefix's blocks, in order; asked while the first request holds all of them."""
    return engine.store.tables["r0"][:12]


@pytest.mark.parametrize("policy", ["random", "streaming_llm"])
def test_skip_leaves_shared_blocks_alone_until_they_are_not_shared(policy: str) -> None:
    engine = sharers("skip", policy=policy).run(1)
    shared = set(prefix_blocks(engine))
    engine.run(12)
    assert all(shared <= set(table) for table in engine.store.tables.values())
    counters = engine.runtime.counters
    assert counters.reclamation.relocations > 0
    assert counters.reclamation.shared_skipped_blocks > 0
    assert (
        counters.reclamation.shared_released_blocks
        == counters.reclamation.shared_copied_blocks
        == 0
    )
    engine.remove("r0")
    engine.run(3)
    assert all(shared <= set(table) for table in engine.store.tables.values())
    engine.remove("r1")
    engine.run(3)
    (table,) = engine.runtime.tables
    assert len(table.blocks) <= table.num_live // 4 + 1
    assert (table.block_live() > 0).all()


def test_index_lets_go_of_all_dead_shared_blocks_and_writes_nothing_for_it() -> None:
    engine = sharers("index", policy="streaming_llm", budget_tokens=10).run(1)
    shared = prefix_blocks(engine)
    free = engine.store.num_free_blocks()
    plan = engine.step()
    engine.check()
    assert not set((plan.source_slots // 4).tolist()) & set(shared)
    held = {block for table in engine.store.tables.values() for block in table}
    assert held & set(shared) == {shared[0]}  # the sinks are read where they lie
    assert engine.store.ref_cnt[shared[0]] == 3
    assert engine.runtime.counters.reclamation.shared_released_blocks == 33
    assert engine.store.num_free_blocks() >= free + 11


def compacted(engine: CoreEngine) -> tuple[Any, list[int]]:
    """A manual compaction for the next step, all requests having evicted; the prefix's blocks."""
    shared = prefix_blocks(engine.run(1))
    engine.run(2)
    return engine.runtime.operations.add("me", None, 63, False), shared


@pytest.mark.parametrize("planner", PLANNERS)
def test_copying_frees_more_than_index_and_index_more_than_skip(planner: str) -> None:
    used: dict[str, int] = {}
    for tier in TIERS:
        engine = sharers(tier, experiment={"planner": planner}, reclamation="paused")
        operation, _ = compacted(engine)
        engine.run(1)
        used[tier] = engine.runtime.tables.pool.num_used
        now = engine.runtime.counters.reclamation
        events = engine.runtime.events.page(0, 1000).events
        moved = [e.data for e in events if e.kind == "relocation"]
        freed = sum(data["freed_blocks"] for data in moved)
        assert operation.result.freed_blocks == freed
        assert now.shared_skipped_blocks > 0
        if tier == "copy":
            copied = [data for data in moved if data["shared_blocks"]]
            assert len(copied) == 3
            assert sum(data["shared_blocks"] for data in copied) == now.shared_copied_blocks
            assert 0 < now.shared_freed_blocks < now.shared_copied_blocks
            assert 0 < now.shared_copied_tokens <= now.moved_tokens
        else:
            assert now.shared_copied_blocks == now.shared_freed_blocks == 0
    assert used["copy"] < used["index"] < used["skip"]


@pytest.mark.parametrize("policy", ["random", "streaming_llm", "h2o"])
def test_off_knows_no_tier(policy: str) -> None:
    tables = []
    for tier in TIERS:
        engine = sharers(tier, policy=policy, reclamation="off").run(20)
        tables.append(engine.store.tables)
        assert engine.runtime.counters.reclamation.relocations == 0
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize("change", [{"prefix_sharing": "index"}, {"reclamation": "off"}])
def test_leaving_skip_lets_go_of_what_it_kept_at_the_next_step(change: dict[str, str]) -> None:
    engine = sharers("skip", policy="streaming_llm", budget_tokens=10).run(4)
    runtime = engine.runtime
    assert all(len(state.retained_dead_blocks) == 11 for state in runtime.requests.held.values())
    runtime.active.config = replace(runtime.config, **change)
    engine.run(1)
    assert all((table.block_live() > 0).all() for table in runtime.tables)
    assert not any(state.retained_dead_blocks for state in runtime.requests.held.values())


def test_a_group_waits_for_a_holder_that_has_not_evicted() -> None:
    engine = sharers("copy").run(1)
    shared = set(prefix_blocks(engine))
    table = engine.runtime.tables["r2"]
    choose = engine.runtime.ranking.choose
    engine.runtime.ranking.choose = (  # type: ignore[method-assign]
        lambda rows: choose(rows[rows != table.row])
    )
    engine.run(8)
    assert shared <= set(engine.store.tables["r2"])
    assert engine.runtime.counters.reclamation.shared_copied_blocks == 0
    engine.remove("r2")
    engine.run(4)
    assert engine.runtime.counters.reclamation.shared_copied_blocks > 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_sharer_preempted_in_its_group_takes_its_plan_along(victim: int) -> None:
    """It is admitted again in the same step and hits the blocks that its group emptied."""
    engine = sharers("copy", reclamation="paused")
    operation, shared = compacted(engine)
    runtime = engine.runtime
    begin, planned = runtime.begin_step, runtime.relocator.planned

    def begin_then_preempt(ready: Any) -> None:
        begin(ready)
        assert all(moving.plan.shared_blocks for moving in planned.values())
        promised = sum(moving.relocation.freed_blocks for moving in planned.values())
        engine.preempt(engine.running[victim])
        rest = sum(moving.relocation.freed_blocks for moving in planned.values())
        assert (len(planned), rest) == (2, promised)
        assert promised > 0

    runtime.begin_step = begin_then_preempt  # type: ignore[method-assign]
    engine.step()
    runtime.begin_step = begin  # type: ignore[method-assign]
    engine.check()
    assert engine.store.tables[f"r{victim}"][:12] == shared
    assert operation.state == "done"
    assert operation.result.freed_blocks == operation.plan.freed_blocks > 0
    assert runtime.counters.reclamation.relocations == 2
    engine.run(20)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_sharer_may_finish_in_the_step_after_its_group_was_planned(lag: int) -> None:
    engine = sharers("copy", reclamation="paused")
    operation, _ = compacted(engine)
    engine.worker_lag_steps = lag
    engine.step()
    assert (engine.runtime.counters.reclamation.shared_copied_blocks > 0) == (lag == 0)
    engine.remove("r1")
    engine.run(5)
    assert operation.state == "done"
    assert operation.result.freed_blocks == operation.plan.freed_blocks > 0


def test_a_compaction_of_one_request_moves_no_other() -> None:
    engine = sharers("copy", reclamation="paused").run(3)
    operation = engine.runtime.operations.add("me", "r1", 63, False)
    engine.run(1)
    assert operation.state == "done"
    assert engine.runtime.counters.reclamation.shared_copied_blocks == 0


def test_what_copying_emptied_is_hit_in_the_same_step_with_its_contents() -> None:
    """The plan is made before the admissions of the step: the blocks are free, but still cached."""
    engine = sharers("copy", reclamation="paused")
    _, shared = compacted(engine)
    engine.add("late", 58, prefix="p", prefix_tokens=48, seed=9)
    engine.step()
    engine.check()  # the cached blocks hold what their hashes name, and so reads the newcomer
    assert engine.runtime.counters.reclamation.shared_copied_blocks > 0
    assert engine.store.tables["late"][:12] == shared
    assert sum(engine.store.ref_cnt[block] == 1 for block in shared) > 3


def test_the_front_of_a_prefix_leaves_the_cache_last() -> None:
    """Without its first block, nothing of a cached prefix can be hit."""
    engine = sharers("index", policy="streaming_llm").run(1)
    shared = prefix_blocks(engine)
    engine.run(2)
    freed = [block for block in engine.store.free if block in shared]
    assert freed == shared[:0:-1]


# ---------------------------------------------------------------- controls


def test_control_freeing_a_shared_block_for_all_is_noticed() -> None:
    """A holder's reference is dropped twice: the store would reallocate a block in use."""
    engine = sharers("index").run(1)
    engine.store.give_back([prefix_blocks(engine)[0]])
    with pytest.raises(InvariantViolation, match="reference counts differ"):
        engine.runtime.check()


def test_control_a_round_that_ignores_holders_breaks_its_promise() -> None:
    with pytest.raises(InvariantViolation, match="promised to free"):
        deny_sharing(sharers("copy")).run(12)
