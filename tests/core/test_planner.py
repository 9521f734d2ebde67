"""The relocation planner: pure, bounded, admissible, profitable; `plug` packs in place, `pack` is
the paper's rule.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.planning.planner import Layout, RelocationPlan, num_excess_blocks, plan_relocation
from vtoken.tables.token_tables import TokenTables
from vtoken.wire import PlannerName

PLANNERS: list[PlannerName] = ["pack", "plug"]
KINDS = ["private", "private", "hashed", "shared"]


@st.composite
def layouts(draw: st.DrawFn, kinds: list[str] = KINDS) -> Layout:
    """Up to 7 blocks of 1 to 4 slots in any state; ids in any order, as recycling leaves them."""
    size = draw(st.integers(1, 4))
    num_blocks = draw(st.integers(1, 7))
    live = draw(st.lists(st.booleans(), min_size=num_blocks * size, max_size=num_blocks * size))
    places = np.flatnonzero(live)
    ids = draw(st.permutations(range(len(places))))
    grid = np.full(num_blocks * size, -1, dtype=np.int64)
    grid[places] = np.array(ids, dtype=np.int64) * 3
    kind = [draw(st.sampled_from(kinds)) for _ in range(num_blocks)]
    names = draw(st.permutations(range(1, num_blocks + 1)))
    return Layout(
        "r",
        tuple(names),
        grid.reshape(num_blocks, size),
        movable=np.array([k != "shared" for k in kind]),
        writable=np.array([k == "private" for k in kind]),
    )


def num_live(layout: Layout) -> npt.NDArray[np.int64]:
    live: npt.NDArray[np.int64] = np.count_nonzero(layout.grid >= 0, axis=1)
    return live


def layout(rows: list[list[int]], *, readonly: tuple[int, ...] = ()) -> Layout:
    writable = np.array([i not in readonly for i in range(len(rows))])
    return Layout(
        "r",
        tuple(10 + i for i in range(len(rows))),
        np.array(rows, dtype=np.int64),
        movable=np.ones(len(rows), dtype=np.bool_),
        writable=writable,
    )


def applied(layout: Layout, plan: RelocationPlan) -> dict[int, int]:
    """Token -> slot after the plan, its fresh blocks named 100, 101, ..."""
    s = layout.block_size
    fresh = [100 + i for i in range(plan.num_fresh_blocks)]
    bound = plan.bind(fresh, s)
    where = {
        int(token): layout.blocks[i] * s + o
        for i, row in enumerate(layout.grid)
        for o, token in enumerate(row)
        if token >= 0
    }
    sources = [where[token] for token in bound.token_ids.tolist()]
    assert bound.source_slots.tolist() == sources
    return where | dict(
        zip(bound.token_ids.tolist(), bound.destination_slots.tolist(), strict=True)
    )


@given(layouts(), st.sampled_from(PLANNERS), st.integers(1, 7), st.integers(0, 4))
@settings(max_examples=400)
def test_every_plan_is_bounded_profitable_and_safe(
    layout: Layout, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    before = layout.grid.copy()
    plan = plan_relocation(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
    assert (layout.grid == before).all()
    if plan is None:
        return
    s = layout.block_size
    rank = {block: i for i, block in enumerate(layout.blocks)}
    assert 0 < len(plan.source_blocks) <= batch_size
    assert plan.num_fresh_blocks <= headroom
    assert plan.num_freed_blocks > 0
    sources = {rank[block] for block in plan.source_blocks}
    assert all(layout.movable[i] for i in sources)
    inside = {int(t) for i in sources for t in layout.grid[i] if t >= 0}
    assert inside <= set(plan.token_ids.tolist())
    assert len(set(plan.token_ids.tolist())) == plan.num_moved_tokens
    live = {
        layout.blocks[i] * s + o
        for i in range(len(layout.blocks))
        for o in range(s)
        if layout.grid[i, o] >= 0
    }
    slots = plan.destination_slots.tolist()
    assert len(set(slots)) == len(slots)
    assert not live & set(slots)
    for slot in slots:
        if slot >= 0:
            assert layout.writable[rank[slot // s]]
            assert rank[slot // s] not in sources
        else:
            assert 0 <= (-1 - slot) // s < plan.num_fresh_blocks
    assert sorted(b for b in plan.blocks if b >= 0) == sorted(
        b for b in layout.blocks if rank[b] not in sources
    )
    assert sorted(-1 - b for b in plan.blocks if b < 0) == list(range(plan.num_fresh_blocks))
    after = applied(layout, plan)
    assert len(set(after.values())) == len(after)
    assert {slot // s for slot in after.values()} <= {
        100 + -1 - b if b < 0 else b for b in plan.blocks
    }


def best_gain(layout: Layout, planner: PlannerName, batch_size: int, headroom: int) -> int:
    """The most blocks that any choice of sources frees."""
    s = layout.block_size
    live = num_live(layout)
    candidates = [i for i in range(len(live)) if layout.movable[i] and live[i] < s]
    best = 0
    for k in range(1, min(batch_size, len(candidates)) + 1):
        for sources in combinations(candidates, k):
            moved = sum(int(live[i]) for i in sources)
            room = 0
            if planner == "plug":
                others = set(range(len(live))) - set(sources)
                room = sum(s - int(live[i]) for i in others if layout.writable[i])
            fresh = -(-max(0, moved - room) // s)
            if fresh <= headroom:
                best = max(best, k - fresh)
    return best


@given(layouts(), st.sampled_from(PLANNERS), st.integers(1, 7), st.integers(0, 4))
@settings(max_examples=300)
def test_no_other_choice_of_sources_frees_more_blocks(
    layout: Layout, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    plan = plan_relocation(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
    gain = 0 if plan is None else plan.num_freed_blocks
    assert gain == best_gain(layout, planner, batch_size, headroom)


@given(layouts(kinds=["private"]))
@settings(max_examples=300)
def test_plug_on_private_blocks_reaches_the_packed_bound_densely_without_fresh_blocks(
    layout: Layout,
) -> None:
    n, s, live = len(layout.blocks), layout.block_size, int(num_live(layout).sum())
    plan = plan_relocation(layout, "plug", batch_size=n, headroom_blocks=n)
    if n == -(-live // s):
        assert plan is None
        return
    assert plan is not None
    assert plan.num_fresh_blocks == 0
    assert len(plan.blocks) == -(-live // s)
    front = {plan.blocks[i // s] * s + i % s for i in range(live)}
    assert set(applied(layout, plan).values()) == front


@given(layouts(), st.integers(1, 7), st.integers(0, 7))
@settings(max_examples=300)
def test_pack_follows_the_papers_rule(layout: Layout, batch_size: int, headroom: int) -> None:
    """Paper 3.3: low-utilisation blocks first, ceil(T / S) destinations, logical order, filled."""
    plan = plan_relocation(layout, "pack", batch_size=batch_size, headroom_blocks=headroom)
    if plan is None:
        return
    s, live = layout.block_size, num_live(layout)
    rank = {block: i for i, block in enumerate(layout.blocks)}
    sources = [rank[b] for b in plan.source_blocks]
    others = [i for i in range(len(live)) if i not in sources and layout.movable[i]]
    assert max(live[sources]) <= min((live[i] for i in others), default=s)
    moved = int(live[sources].sum())
    assert plan.num_moved_tokens == moved
    assert plan.num_fresh_blocks == -(-moved // s)
    assert plan.token_ids.tolist() == sorted(plan.token_ids.tolist())
    assert plan.destination_slots.tolist() == [-1 - i for i in range(moved)]


@given(layouts(), st.sampled_from(PLANNERS))
@settings(max_examples=200)
def test_a_plan_is_accepted_by_the_token_table(layout: Layout, planner: PlannerName) -> None:
    """`apply_moves` verifies what the planner promises; the table reaches the promised blocks."""
    plan = plan_relocation(layout, planner, batch_size=7, headroom_blocks=7)
    if plan is None:
        return
    n, s = len(layout.blocks), layout.block_size
    tables = TokenTables(n + 8, s)
    total = n * s
    tables.sync_new_tokens("r", layout.blocks, total)
    ids = layout.grid.ravel()
    tables.evict_tokens("r", np.flatnonzero(ids < 0))
    translate = {int(t): int(p) for p, t in enumerate(ids) if t >= 0}
    fresh = [n + 1 + i for i in range(plan.num_fresh_blocks)]
    bound = plan.bind(fresh, s)
    moved = np.array([translate[t] for t in bound.token_ids.tolist()], dtype=np.int64)
    dropped = tables.apply_moves("r", moved, bound.destination_slots, bound.blocks)
    assert sorted(dropped) == sorted(plan.source_blocks)
    tables.check()


# ---------------------------------------------------------------- hand-worked cases


def test_plug_moves_one_token_when_one_hole_suffices() -> None:
    plan = plan_relocation(
        layout([[0, 1, 2, 3], [4, -1, 6, 7], [-1, 9, -1, -1]]),
        "plug",
        batch_size=8,
        headroom_blocks=0,
    )
    assert plan is not None
    assert plan.token_ids.tolist() == [9]
    assert plan.destination_slots.tolist() == [11 * 4 + 1]
    assert plan.blocks == (10, 11)


def test_plug_evacuates_the_end_of_the_last_block_to_leave_it_dense() -> None:
    plan = plan_relocation(
        layout([[0, -1, 2, 3], [-1, 5, -1, 7], [8, -1, -1, -1]]),
        "plug",
        batch_size=8,
        headroom_blocks=0,
    )
    assert plan is not None
    assert plan.source_blocks == (12,)
    assert sorted(plan.token_ids.tolist()) == [7, 8]
    assert sorted(plan.destination_slots.tolist()) == [41, 44]


def test_pack_needs_headroom_where_plug_does_not() -> None:
    rows = [[0, -1], [2, -1]]
    assert plan_relocation(layout(rows), "pack", batch_size=8, headroom_blocks=0) is None
    plan = plan_relocation(layout(rows), "plug", batch_size=8, headroom_blocks=0)
    assert plan is not None
    assert plan.num_moved_tokens == 1


def test_plug_empties_a_read_only_block_where_a_writable_one_gains_nothing() -> None:
    plan = plan_relocation(
        layout([[0, 1, -1, -1], [4, 5, -1, -1]], readonly=(1,)),
        "plug",
        batch_size=8,
        headroom_blocks=0,
    )
    assert plan is not None
    assert plan.source_blocks == (11,)


def test_read_only_blocks_come_first_so_that_appends_go_to_a_writable_one() -> None:
    plan = plan_relocation(
        layout([[0, 1, 2, 3], [4, -1, -1, -1], [8, 9, -1, 11], [12, -1, 14, 15]], readonly=(0, 2)),
        "plug",
        batch_size=1,
        headroom_blocks=0,
    )
    assert plan is not None
    assert plan.blocks == (10, 12, 13)


def test_b_bounds_the_sources() -> None:
    rows = [[4 * i, -1, -1, -1] for i in range(6)]
    for batch_size in range(1, 6):
        plan = plan_relocation(layout(rows), "plug", batch_size=batch_size, headroom_blocks=0)
        assert plan is not None
        assert len(plan.source_blocks) == min(batch_size, 4)


def test_full_blocks_are_left_alone() -> None:
    rows = [[0, 1], [2, 3]]
    for planner in PLANNERS:
        assert plan_relocation(layout(rows), planner, batch_size=8, headroom_blocks=8) is None


def test_a_block_that_the_next_token_needs_is_no_excess() -> None:
    assert num_excess_blocks(9, 256, 32) == 0
    assert num_excess_blocks(9, 255, 32) == 1
    assert num_excess_blocks(10, 257, 32) == 1
