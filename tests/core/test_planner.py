"""The relocation planner: pure, bounded, admissible, profitable; `plug` packs in place, `pack` is
the paper's rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.numpy_planner import plan_twin
from tests.support.core.numpy_planner import takes_block as twin_takes_block
from tests.support.core.tables import evict_tokens, sync_new_tokens
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.planning.moves import takes_block
from vtoken.core.planning.planner import Layout, RelocationPlan, search
from vtoken.core.tables.token_tables import TokenTables
from vtoken.wire import Geometry, PlannerName

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
        np.array(names, dtype=np.int64),
        grid.reshape(num_blocks, size),
        movable=np.array([k != "shared" for k in kind]),
        writable=np.array([k == "private" for k in kind]),
        recycles=draw(st.booleans()),
    )


def plan_relocation(
    layout: Layout, planner: PlannerName, *, batch_size: int, headroom_blocks: int
) -> RelocationPlan | None:
    return search(layout, planner, batch_size=batch_size, headroom_blocks=headroom_blocks).plan


def num_live(layout: Layout) -> npt.NDArray[np.int64]:
    live: npt.NDArray[np.int64] = np.count_nonzero(layout.grid >= 0, axis=1)
    return live


def layout(
    rows: list[list[int]], *, readonly: tuple[int, ...] = (), recycles: bool = True
) -> Layout:
    writable = np.array([i not in readonly for i in range(len(rows))])
    return Layout(
        "r",
        np.arange(10, 10 + len(rows)),
        np.array(rows, dtype=np.int64),
        movable=np.ones(len(rows), dtype=np.bool_),
        writable=writable,
        recycles=recycles,
    )


def applied(layout: Layout, plan: RelocationPlan) -> dict[int, int]:
    """Token -> slot after the plan, with fresh blocks 100, 101, ..."""
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


@given(layouts(), st.sampled_from(PLANNERS), st.integers(1, 7), st.integers(0, 4))
@settings(max_examples=600)
def test_the_kernels_plan_what_plain_numpy_plans(
    layout: Layout, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    assert takes_block(layout.grid, layout.writable, layout.recycles) == twin_takes_block(layout)
    assert_as_twin(layout, planner, batch_size, headroom)


@given(st.integers(0, 1 << 20), st.sampled_from(PLANNERS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_large_layouts_are_planned_as_plain_numpy_plans_them(
    seed: int, planner: PlannerName, recycles: bool
) -> None:
    """Ids of up to three digits of the sort, in any order."""
    rng = np.random.default_rng(seed)
    n, s = int(rng.integers(1, 60)), int(rng.integers(1, 40))
    live = rng.random(n * s) < rng.random()
    grid = np.full(n * s, -1, dtype=np.int64)
    grid[live] = rng.choice(1 << 20, size=int(live.sum()), replace=False)
    writable = rng.random(n) < rng.random()
    layout = Layout(
        "r",
        rng.permutation(1000)[:n],
        grid.reshape(n, s),
        movable=writable | (rng.random(n) < 0.7),
        writable=writable,
        recycles=recycles,
    )
    assert_as_twin(layout, planner, int(rng.integers(1, n + 1)), int(rng.integers(n)))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("recycles", [True, False])
def test_only_sources_become_empty(planner: PlannerName, recycles: bool) -> None:
    """Few sources, so that B is reached and many blocks stay. An empty block that stays would be
    moved for nothing, and nobody would count it."""
    rng = np.random.default_rng(1)
    num_plans = 0
    for _ in range(4000):
        n, s = int(rng.integers(2, 8)), int(rng.integers(2, 6))
        live = rng.random((n, s)) < rng.random()
        live[np.arange(n), rng.integers(s, size=n)] = True  # no block is empty
        grid = np.full((n, s), -1, dtype=np.int64)
        grid[live] = rng.permutation(int(live.sum()))
        writable = rng.random(n) < 0.8
        movable = writable | (rng.random(n) < 0.5)
        layout = Layout("r", rng.permutation(n) + 1, grid, movable, writable, recycles)
        batch_size, headroom = int(rng.integers(1, 4)), int(rng.integers(3))
        assert_as_twin(layout, planner, batch_size, headroom)
        plan = plan_relocation(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
        if plan is None:
            continue
        num_plans += 1
        bound = plan.bind([100 + i for i in range(plan.num_fresh_blocks)], s)
        held = {slot // s for slot in applied(layout, plan).values()}
        assert held == set(bound.blocks.tolist())
    assert num_plans > 800


def assert_as_twin(layout: Layout, planner: PlannerName, batch_size: int, headroom: int) -> None:
    plan = plan_relocation(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
    twin = plan_twin(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
    assert (plan is None) == (twin is None)
    if plan is None or twin is None:
        return
    for name, value in vars(twin).items():
        found = getattr(plan, name)
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, name


def test_bind_names_fresh_blocks_in_slots_and_table() -> None:
    rows = [[0, 1, -1], [3, -1, -1], [6, -1, -1], [9, -1, -1], [12, -1, -1], [15, -1, -1]]
    plan = plan_relocation(layout(rows), "pack", batch_size=9, headroom_blocks=9)
    assert plan is not None
    assert plan.num_fresh_blocks == 2
    bound = plan.bind([40, 30], 3)
    assert bound.destination_slots.tolist() == [120, 121, 122, 90, 91]
    assert sorted(bound.blocks.tolist()) == [10, 30, 40]
    assert plan.blocks.min() == -2  # a plan is not changed
    with pytest.raises(ValueError, match="1 fresh blocks for 2 places"):
        plan.bind([40], 3)


def best_gain(layout: Layout, planner: PlannerName, batch_size: int, headroom: int) -> int:
    """The most blocks that any choice of sources gains, the next token's place counted."""
    s = layout.block_size
    live = num_live(layout)
    candidates = [i for i in range(len(live)) if layout.movable[i] and live[i] < s]
    best = 0
    before = twin_takes_block(layout)
    for k in range(1, min(batch_size, len(candidates)) + 1):
        for sources in combinations(candidates, k):
            moved = sum(int(live[i]) for i in sources)
            others = [i for i in range(len(live)) if i not in sources and layout.writable[i]]
            holes = sum(s - int(live[i]) for i in others)
            fresh = -(-max(0, moved - holes if planner == "plug" else moved) // s)
            free = holes + fresh * s - moved
            if planner == "pack" and not layout.recycles:
                free = fresh * s - moved + sum(int(layout.grid[i, -1] < 0) for i in others)
            if fresh <= headroom and k > fresh:
                best = max(best, k - fresh + before - (free == 0))
    return best


@given(layouts(), st.sampled_from(PLANNERS), st.integers(1, 7), st.integers(0, 4))
@settings(max_examples=300)
def test_no_other_choice_of_sources_gains_more_blocks(
    layout: Layout, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    """`pack` takes the emptiest blocks, possibly the one of the next token."""
    plan = plan_relocation(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
    best = best_gain(layout, planner, batch_size, headroom)
    gain = 0 if plan is None else gained(layout, plan)[2]
    assert best - (planner == "pack") <= gain <= best


@given(layouts(kinds=["private"]))
@settings(max_examples=300)
def test_plug_on_private_blocks_packs_densely_without_fresh_blocks(layout: Layout) -> None:
    """The remaining blocks are those that the live tokens and the next one need."""
    n, s, live = len(layout.blocks), layout.block_size, int(num_live(layout).sum())
    plan = plan_relocation(layout, "plug", batch_size=n, headroom_blocks=n)
    if n <= live // s + 1:
        assert plan is None or live == (n - 1) * s  # full blocks instead of one open at its end
        return
    assert plan is not None
    assert plan.num_fresh_blocks == 0
    assert len(plan.blocks) in {-(-live // s), live // s + 1}
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


def gained(layout: Layout, plan: RelocationPlan) -> tuple[bool, bool, int]:
    """A real table follows `plan`: whether the next token takes a block before and after it, and
    the blocks gained. `apply_moves` verifies what the planner promises."""
    n, s = len(layout.blocks), layout.block_size
    tables = TokenTables(n + 8, s)
    sync_new_tokens(tables, "r", layout.blocks.tolist(), n * s)
    ids = layout.grid.ravel()
    evict_tokens(tables, "r", np.flatnonzero(ids < 0))
    table = tables["r"]
    readonly = frozenset(layout.blocks[~layout.writable].tolist())
    before = next_takes_block(tables, "r", readonly, layout.recycles)
    translate = {int(t): int(p) for p, t in enumerate(ids) if t >= 0}
    fresh = [n + 1 + i for i in range(plan.num_fresh_blocks)]
    bound = plan.bind(fresh, s)
    moved = np.array([translate[t] for t in bound.token_ids.tolist()], dtype=np.int64)
    dropped = tables.apply_moves("r", moved, bound.destination_slots, bound.blocks.tolist())
    assert sorted(dropped) == sorted(plan.source_blocks)
    tables.check()
    after = next_takes_block(tables, "r", readonly, layout.recycles)
    return before, after, n - len(table.blocks) + before - after


def next_takes_block(
    tables: TokenTables, name: str, readonly: Iterable[int], recycles: bool
) -> bool:
    """Like `TokenAppender`; exactly `readonly` is read-only."""
    table = tables[name]
    table.protect(readonly)
    places = tables.choose_places(recycling=recycles).next_extent[table.row]
    return -(-places // table.block_size) > table.num_blocks


@given(layouts(), st.sampled_from(PLANNERS), st.integers(1, 7), st.integers(0, 7))
@settings(max_examples=400)
def test_the_next_token_takes_no_block_that_the_gain_does_not_count(
    layout: Layout, planner: PlannerName, batch_size: int, headroom: int
) -> None:
    plan = plan_relocation(layout, planner, batch_size=batch_size, headroom_blocks=headroom)
    if plan is None:
        return
    before, after, gain = gained(layout, plan)
    assert gain > 0
    assert plan.retaken_blocks == max(0, after - before)
    assert plan.num_freed_blocks > plan.retaken_blocks


@given(layouts(), st.integers(1, 7), st.integers(0, 7))
@settings(max_examples=300)
def test_plug_leaves_the_next_token_a_place_wherever_it_leaves_any(
    layout: Layout, batch_size: int, headroom: int
) -> None:
    plan = plan_relocation(layout, "plug", batch_size=batch_size, headroom_blocks=headroom)
    if plan is None:
        return
    s = layout.block_size
    private = {*layout.blocks[layout.writable].tolist(), *range(100, 108)}
    bound = plan.bind([100 + i for i in range(plan.num_fresh_blocks)], s)
    taken = sum(slot // s in private for slot in applied(layout, plan).values())
    room = s * len(private.intersection(bound.blocks.tolist()))
    assert gained(layout, plan)[1] == (taken == room)


# ---------------------------------------------------------------- hand-worked cases


@pytest.mark.parametrize(
    ("rows", "readonly", "batch_size", "moved", "blocks"),
    [
        ([[0, 1, 2, 3], [4, -1, 6, -1], [-1, 9, -1, -1]], (), 8, {9: 45}, [10, 11]),
        # The end of the last block is evacuated, to leave it dense.
        ([[0, -1, 2, 3], [-1, 5, -1, 7], [8, -1, -1, -1]], (), 8, {7: 44, 8: 41}, [10, 11]),
        # A read-only block is emptied where a writable one gains nothing.
        ([[0, -1, -1, -1], [4, 5, -1, -1]], (1,), 8, {4: 41, 5: 42}, [10]),
        # Read-only blocks come first, so that appends go to a writable one.
        (
            [[0, 1, 2, 3], [4, -1, -1, -1], [8, -1, -1, 11], [12, -1, 14, -1]],
            (0, 2),
            1,
            {4: 53},
            [10, 12, 13],
        ),
    ],
    ids=["one hole suffices", "dense", "read-only", "read-only first"],
)
def test_plug_moves_these_tokens_and_leaves_these_blocks(
    rows: list[list[int]],
    readonly: tuple[int, ...],
    batch_size: int,
    moved: dict[int, int],
    blocks: list[int],
) -> None:
    before = layout(rows, readonly=readonly)
    plan = plan_relocation(before, "plug", batch_size=batch_size, headroom_blocks=0)
    assert plan is not None
    slots = plan.destination_slots.tolist()
    assert dict(zip(plan.token_ids.tolist(), slots, strict=True)) == moved
    assert plan.blocks.tolist() == blocks


def test_pack_needs_headroom_where_plug_does_not() -> None:
    rows = [[0, -1, -1], [3, -1, -1]]
    assert plan_relocation(layout(rows), "pack", batch_size=8, headroom_blocks=0) is None
    assert plan_relocation(layout(rows), "plug", batch_size=8, headroom_blocks=0) is not None


@pytest.mark.parametrize("recycles", [True, False])
def test_a_block_that_the_next_token_takes_again_is_not_freed(recycles: bool) -> None:
    """Freeing the last block would fill the only hole: the next token would take a block."""
    rows = [[0, 1, 2, 3], [4, -1, 6, 7], [9, -1, -1, -1]]
    full = layout(rows, recycles=recycles)
    assert plan_relocation(full, "plug", batch_size=8, headroom_blocks=0) is None
    rows[2] = [-1, -1, -1, 9]  # without recycling the next token takes a block as it is
    plan = plan_relocation(layout(rows, recycles=recycles), "plug", batch_size=8, headroom_blocks=0)
    assert (plan is None) == recycles


def test_without_recycling_free_places_come_behind_the_last_token() -> None:
    """The read-only block keeps its hole, and the last one is still open at its end."""
    rows = [[0, 1, -1, 3], [4, -1, 6, 7], [8, -1, -1, 11], [-1, 13, -1, -1]]
    plans = [
        plan_relocation(
            layout(rows, readonly=(0,), recycles=recycles), "plug", batch_size=1, headroom_blocks=0
        )
        for recycles in (True, False)
    ]
    tokens = [plan.token_ids.tolist() for plan in plans if plan is not None]
    assert tokens == [[13], [13, 11]]
    assert plans[1] is not None
    assert plans[1].destination_slots.tolist() == [45, 49]
    assert plans[1].blocks.tolist() == [10, 11, 12]


def test_one_token_more_moves_where_the_last_slot_would_be_taken() -> None:
    """B keeps half-empty blocks; the last slot of the last one opens for the next token."""
    rows = [[0, -1, -1, 3], [4, -1, -1, 7], [8, -1, -1, 11], [12, -1, -1, -1]]
    plan = plan_relocation(layout(rows, recycles=False), "plug", batch_size=1, headroom_blocks=0)
    assert plan is not None
    assert plan.token_ids.tolist() == [12, 11]
    assert plan.blocks.tolist() == [10, 11, 12]


def test_the_only_token_of_the_last_block_opens_its_last_slot_within_the_block() -> None:
    """B keeps the block, so it may not become empty: its token would be moved for nothing."""
    rows = [[0, 1, -1, 3], [-1, -1, -1, 7], [-1, -1, -1, 11], [-1, -1, -1, 15]]
    plan = plan_relocation(layout(rows, recycles=False), "plug", batch_size=1, headroom_blocks=0)
    assert plan is not None
    assert plan.source_blocks.tolist() == [11]
    assert plan.token_ids.tolist() == [7, 15]
    assert plan.destination_slots.tolist() == [42, 52]
    assert plan.blocks.tolist() == [10, 12, 13]


def test_pack_puts_a_block_with_an_open_last_slot_last() -> None:
    rows = [[0, 1, 2, -1], [-1, 5, 6, -1], [8, -1, -1, -1], [12, -1, -1, -1], [-1, -1, 18, 19]]
    rows += [[20, -1, -1, -1]]
    for recycles, blocks in ((True, [10, -1, 11, 14]), (False, [10, -1, 14, 11])):
        plan = plan_relocation(
            layout(rows, recycles=recycles), "pack", batch_size=3, headroom_blocks=1
        )
        assert plan is not None
        assert plan.blocks.tolist() == blocks


@pytest.mark.parametrize(
    ("num_live", "max_drafts", "lookahead", "needed"),
    [
        (255, 0, 0, 8),
        (256, 0, 0, 9),
        (257, 0, 0, 9),
        (255, 1, 0, 9),
        (254, 1, 0, 8),
        (254, 1, 1, 9),
    ],
)
def test_a_block_that_the_next_tokens_need_is_no_excess(
    num_live: int, max_drafts: int, lookahead: int, needed: int
) -> None:
    geometry = Geometry(64, 32, 1, 1, 1, 1)
    shape = EngineShape(geometry, max_drafts=max_drafts, lookahead=lookahead)
    assert shape.needed_blocks(num_live) == needed
