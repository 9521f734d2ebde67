"""Relocation planning for one request: which blocks to empty, and where their live tokens go.

Pure functions from a frozen layout to a frozen plan or None, independent of the pool and vLLM. Two
planners (paper 3.3, "relocation planning"):
- `pack` copies the live tokens of low-utilisation blocks into fresh blocks.
- `plug` first fills holes of the blocks that stay and takes fresh blocks only for the rest; keeping
  the fullest blocks frees the most blocks with the fewest moves.

The gain includes the place of the next token: blocks held after the plan, plus one if the next
single token then has no place, compared with the same before the plan. So no plan frees a block
that the next token takes again.

Invariants of a plan, for s source blocks, d fresh ones, and `retaken` = 1 if only the plan makes
the next token take a block (`vtoken.core.planning.moves` has the rule):
1. s <= B,  d <= headroom,  s - d > 0,  s - d - retaken > 0   (bounded, admissible, profitable: I4)
2. every live token of a source block moves, once; destinations are distinct and not live (I2)
3. destinations are in fresh blocks or in writable blocks that are not sources
4. blocks that are not movable are never sources of `search`; hashed and shared ones are
   never destinations of any plan
5. if any place is left in the blocks that `plug` fills, the next token can use one
6. no block that stays becomes empty: a block is emptied as a source, within B, and freed
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace

from vtoken.base.arrays import Bools, Ints
from vtoken.core.planning import moves
from vtoken.wire import PlannerName


class Layout(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A consistent snapshot of one request's blocks.

    `blocks` [n]: the block table. `grid` [n, S]: live token ids by place, -1 elsewhere. `movable`
    [n]: may be emptied. `writable` [n]: may be written (private and unhashed). `recycles`: the next
    token may be written to any hole of a writable block, else only behind the last one.
    """

    request_id: str
    blocks: Ints
    grid: Ints
    movable: Bools
    writable: Bools
    recycles: bool

    @property
    def block_size(self) -> int:
        return int(self.grid.shape[1])


class RelocationPlan(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The moves of one request. Until `bind`, slots of fresh blocks are -1 - (i * S + offset).

    `token_ids`, `source_slots`, `destination_slots` [k]; `source_blocks` [s]; `blocks` [n - s + d]
    is the block table afterwards, with -1 - i for the i-th fresh block. `retaken_blocks`: how many
    of the freed blocks the next token takes again. `shared_blocks`: sources that other requests
    hold too; the plan then belongs to a group, and `freed_blocks` is its share of the blocks that
    the group frees (`vtoken.core.planning.sharing`).
    """

    request_id: str
    planner: PlannerName
    token_ids: Ints
    source_slots: Ints
    destination_slots: Ints
    source_blocks: Ints
    num_fresh_blocks: int
    blocks: Ints
    retaken_blocks: int = 0
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
        """The same plan with `fresh` [num_fresh_blocks] as its fresh blocks."""
        if len(fresh) != self.num_fresh_blocks:
            raise ValueError(f"{len(fresh)} fresh blocks for {self.num_fresh_blocks} places")
        if not fresh:
            return self
        names = np.array(fresh, dtype=np.int64)
        slots, blocks = moves.bind_fresh(self.destination_slots, self.blocks, names, block_size)
        return replace(self, destination_slots=slots, num_fresh_blocks=0, blocks=blocks)


class SearchResult(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The planner's result for one request.

    `missing_blocks`: without a plan, the fresh blocks beyond the headroom that one would take.
    `num_passed_over`: blocks with a hole that are not movable.
    """

    plan: RelocationPlan | None
    missing_blocks: int
    num_passed_over: int


def search(
    layout: Layout, planner: PlannerName, *, batch_size: int, headroom_blocks: int
) -> SearchResult:
    """Find the plan that gains most blocks with at most B sources, the cheaper one among equals.

    Emptying a writable block costs S places (its tokens and the holes it offered), a read-only one
    only its tokens. So taking read-only blocks first gains most; taking the emptiest first moves
    least and wins if it gains as much.
    """
    found, moved, blocks, sources = moves.plan(
        layout.grid,
        layout.blocks,
        layout.movable,
        layout.writable,
        planner == "plug",
        layout.recycles,
        batch_size,
        headroom_blocks,
    )
    num_sources, num_fresh, retaken, missing, passed_over = found.tolist()
    plan = None
    if num_sources:
        plan = RelocationPlan(
            layout.request_id,
            planner,
            token_ids=moved[0],
            source_slots=moved[1],
            destination_slots=moved[2],
            source_blocks=sources,
            num_fresh_blocks=num_fresh,
            blocks=blocks,
            retaken_blocks=retaken,
        )
    return SearchResult(plan, missing, passed_over)


def lay_out(
    layout: Layout, planner: PlannerName, sources: Ints, num_fresh: int, live: Ints
) -> RelocationPlan:
    """The plan that empties logical blocks `sources` [s], ascending, with `num_fresh` fresh blocks.

    `live` [n]: live tokens per block. `num_fresh` must be the number that the planner's rule gives.
    """
    is_source = np.zeros(len(live), dtype=np.bool_)
    is_source[sources] = True
    moved, blocks = moves.lay_out(
        layout.grid,
        layout.blocks,
        layout.writable,
        live,
        is_source,
        num_fresh,
        planner == "plug",
        layout.recycles,
    )
    return RelocationPlan(
        layout.request_id,
        planner,
        token_ids=moved[0],
        source_slots=moved[1],
        destination_slots=moved[2],
        source_blocks=layout.blocks[sources],
        num_fresh_blocks=num_fresh,
        blocks=blocks,
    )
