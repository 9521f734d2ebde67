"""Relocation planning for one request: which blocks to empty, and where their live tokens go.

Pure: a frozen layout in, a frozen plan or None out; knows neither the pool nor vLLM. Two planners
(paper 3.3, "relocation planning"):
- `pack` copies the live tokens of low-utilisation blocks into fresh blocks.
- `plug` fills the holes of the blocks that stay first and takes fresh blocks only for the rest;
  keeping the fullest blocks is the fewest moves that free the most blocks.

Invariants of a plan, for s source blocks and d fresh ones:
1. s <= B,  d <= headroom,  s - d > 0          (bounded, admissible, profitable: I4)
2. every live token of a source block moves, once; destinations are distinct and not live (I2)
3. destinations lie in fresh blocks or in writable blocks that are not sources
4. blocks that are not movable are never sources of `plan_relocation`; hashed and shared ones are
   never destinations of any plan
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vtoken.arrays import Bools, Ints
from vtoken.wire import PlannerName


@dataclass(frozen=True, slots=True)
class Layout:
    """A consistent snapshot of one request's blocks.

    `grid` [n, S]: live token ids by place, -1 elsewhere. `movable` [n]: may be emptied.
    `writable` [n]: may be written (private and unhashed).
    """

    request_id: str
    blocks: tuple[int, ...]
    grid: Ints
    movable: Bools
    writable: Bools

    @property
    def block_size(self) -> int:
        return int(self.grid.shape[1])


@dataclass(frozen=True, slots=True)
class RelocationPlan:
    """What to move. Slots of fresh blocks are negative until `bind`: -1 - (i * S + offset).

    `token_ids`, `source_slots`, `destination_slots` [k]; `blocks` is the block table afterwards,
    the i-th fresh block standing as -1 - i. `shared_blocks`: sources that other requests hold too;
    the plan is then one of a group, and `freed_blocks` its share of what that frees in the pool
    (`vtoken.planning.sharing`).
    """

    request_id: str
    planner: PlannerName
    token_ids: Ints
    source_slots: Ints
    destination_slots: Ints
    source_blocks: tuple[int, ...]
    num_fresh_blocks: int
    blocks: tuple[int, ...]
    shared_blocks: tuple[int, ...] = ()
    freed_blocks: int | None = None

    @property
    def num_moved_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_freed_blocks(self) -> int:
        """Net blocks returned to the pool."""
        return self.num_shed_blocks if self.freed_blocks is None else self.freed_blocks

    @property
    def num_shed_blocks(self) -> int:
        """Blocks by which the request's block table shrinks."""
        return len(self.source_blocks) - self.num_fresh_blocks

    def bind(self, fresh: list[int], block_size: int) -> RelocationPlan:
        """The same plan with the fresh blocks [num_fresh_blocks] named."""
        if len(fresh) != self.num_fresh_blocks:
            raise ValueError(f"{len(fresh)} fresh blocks for {self.num_fresh_blocks} places")
        slots = self.destination_slots.copy()
        new = slots < 0
        if new.any():
            place = -1 - slots[new]
            named = np.asarray(fresh, dtype=np.int64)
            slots[new] = named[place // block_size] * block_size + place % block_size
        return replace(
            self,
            destination_slots=slots,
            num_fresh_blocks=0,
            blocks=tuple(fresh[-1 - b] if b < 0 else b for b in self.blocks),
        )


def num_excess_blocks(num_blocks: int, num_live: int, block_size: int) -> int:
    """Blocks held beyond ceil((live + 1) / S): what the live tokens and the next one need.

    Without the next token's place, a round would free a block that the same step takes again.
    """
    return num_blocks - (num_live // block_size + 1)


def plan_relocation(
    layout: Layout, planner: PlannerName, *, batch_size: int, headroom_blocks: int
) -> RelocationPlan | None:
    """The plan that frees most blocks with at most B sources, the cheaper of those found; or None.

    Emptying a writable block costs S places (what it holds, and the holes it offered), a read-only
    one costs what it holds. Taking read-only blocks first therefore frees most; taking the emptiest
    first moves least, and wins where it frees as many.
    """
    live = np.count_nonzero(layout.grid >= 0, axis=1)
    candidates = np.flatnonzero(layout.movable & (live < layout.block_size))
    if len(candidates) == 0:
        return None
    orders = [candidates[np.argsort(live[candidates], kind="stable")]]
    if planner == "plug" and not layout.writable[candidates].all():
        orders.append(orders[0][np.argsort(layout.writable[orders[0]], kind="stable")])
    choices = [
        _choose(layout, planner, live, order[:batch_size], headroom_blocks) for order in orders
    ]
    gain, _, num_fresh, sources = max(choices, key=lambda choice: choice[:2])
    if gain <= 0:
        return None
    return lay_out(layout, planner, np.sort(sources), num_fresh, live)


def _choose(
    layout: Layout, planner: PlannerName, live: Ints, order: Ints, headroom_blocks: int
) -> tuple[int, int, int, Ints]:
    """The best prefix of `order` as sources: net blocks freed, -tokens moved, fresh, sources."""
    s = layout.block_size
    moved = np.cumsum(live[order])
    if planner == "plug":
        holes = np.where(layout.writable, s - live, 0)
        room = holes.sum() - np.cumsum(holes[order])
        fresh = -(-np.maximum(moved - room, 0) // s)
    else:
        fresh = -(-moved // s)
    gain = np.arange(1, len(order) + 1) - fresh
    gain[fresh > headroom_blocks] = 0
    best = int(np.argmax(gain))
    return int(gain[best]), -int(moved[best]), int(fresh[best]), order[: best + 1]


def lay_out(
    layout: Layout, planner: PlannerName, sources: Ints, num_fresh: int, live: Ints
) -> RelocationPlan:
    """The plan that empties the blocks at the ranks `sources` [s], ascending, into `num_fresh`.

    `live` [n]: live tokens, a block. `num_fresh` are exactly as many as the planner's rule takes.
    """
    s = layout.block_size
    grid = layout.grid
    is_source = np.zeros(len(layout.blocks), dtype=np.bool_)
    is_source[sources] = True
    kept = np.flatnonzero(~is_source)
    source = _occupied(grid, sources)
    source = source[np.argsort(grid.ravel()[source])]
    fillable = kept[layout.writable[kept]] if planner == "plug" else kept[:0]
    fillable = fillable[np.argsort(-live[fillable], kind="stable")]
    partial = kept[live[kept] < s]
    if len(partial) == 0 or (planner == "plug" and layout.writable[partial].all()):
        evacuated, holes = _dense_holes(grid, fillable, live, len(source))
        source = np.concatenate([source, evacuated])
    else:
        holes = _holes(grid, fillable)
    taken = holes[: len(source)]
    num_out = len(source) - len(taken)
    fresh = -1 - np.arange(num_fresh, dtype=np.int64)

    # Read-only blocks first, the rest by falling occupancy: the append position lies in the last.
    after = live + np.bincount(taken // s, minlength=len(live))
    after -= np.bincount(source // s, minlength=len(live))
    filled = np.append(after[kept], np.clip(num_out + (fresh + 1) * s, 0, s))
    writable = np.append(layout.writable[kept], np.ones(num_fresh, dtype=np.bool_))
    blocks = np.asarray(layout.blocks, dtype=np.int64)
    table = np.append(blocks[kept], fresh)[np.lexsort((-filled, writable))]

    def slot(places: Ints) -> Ints:
        slots: Ints = blocks[places // s] * s + places % s
        return slots

    return RelocationPlan(
        request_id=layout.request_id,
        planner=planner,
        token_ids=grid.ravel()[source],
        source_slots=slot(source),
        destination_slots=np.append(slot(taken), -1 - np.arange(num_out, dtype=np.int64)),
        source_blocks=tuple(blocks[sources].tolist()),
        num_fresh_blocks=num_fresh,
        blocks=tuple(table.tolist()),
    )


def _places(mask: Bools, blocks: Ints, block_size: int) -> Ints:
    """Where `mask` [m, S] holds, as places; its rows are those of `blocks` [m], in their order."""
    rows, offsets = np.divmod(np.flatnonzero(mask), block_size)
    places: Ints = blocks[rows] * block_size + offsets
    return places


def _occupied(grid: Ints, blocks: Ints) -> Ints:
    """Places with a live token in `blocks`, in the order given."""
    return _places(grid[blocks] >= 0, blocks, grid.shape[1])


def _holes(grid: Ints, blocks: Ints) -> Ints:
    """Places without a live token in `blocks`, in the order given."""
    return _places(grid[blocks] < 0, blocks, grid.shape[1])


def _dense_holes(grid: Ints, blocks: Ints, live: Ints, num_movers: int) -> tuple[Ints, Ints]:
    """Places to evacuate in the last of `blocks` and the holes to fill, so that nothing is left
    open but the end of that block.

    `blocks` are by falling occupancy. With x tokens in the last one at the end, its tokens at
    offsets >= x move too, and only its holes below x are filled. Falls back to filling in order
    when the holes do not suffice or x would not be positive.
    """
    s = grid.shape[1]
    holes = _holes(grid, blocks)
    none = np.empty(0, dtype=np.int64)
    if len(blocks) == 0 or num_movers >= len(holes):
        return none, holes
    last = int(blocks[-1])
    x = int(live[blocks].sum()) + num_movers - (len(blocks) - 1) * s
    if x <= 0:
        return none, holes
    evacuated: Ints = last * s + x + np.flatnonzero(grid[last, x:] >= 0)
    kept_holes: Ints = holes[(holes // s != last) | (holes % s < x)]
    return evacuated, kept_holes
