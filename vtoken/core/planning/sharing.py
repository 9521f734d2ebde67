"""Copy-on-write of shared prefix blocks: plans that empty them for all their holders at once.

Pure functions from layouts to plans, independent of tables and vLLM. A shared block becomes free
only when every holder has left it, so plans are made for a *group*: blocks X and their holders H,
where holder h holds the blocks X_h of X. Invariants of a group:
1. every holder of every block of X is in H: it has evicted and has no relocation in flight
2. |X| - sum over H of what h takes > 0                     (profitable in the pool: I4)
3. |X_h| - what h takes > 0 for every h                      (every block table shrinks)
4. sum |X_h| <= B,  sum of fresh blocks <= headroom          (bounded, admissible)
where h takes its fresh blocks, plus one if only the group makes its next token take one, by the
rule of `vtoken.core.planning.moves`. Groups extend the requests' own plans: the private sources of
h's own plan stay sources, and "takes" counts blocks beyond that plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from vtoken.base.arrays import Bools, Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.moves import count_live, takes_block
from vtoken.core.planning.planner import Layout, RelocationPlan, lay_out
from vtoken.wire import PlannerName

NO_RANKS: Ints = np.empty(0, dtype=np.int64)


def keeps_dead_shared_blocks(config: VTokenConfig) -> bool:
    """Whether a request keeps an all-dead block as long as another request holds it too.

    Reclamation `off` ignores `prefix_sharing`: it drops every all-dead block, like naive eviction.
    """
    return config.prefix_sharing == "skip" and config.reclamation != "off"


@dataclass(frozen=True, slots=True)
class _Shared:
    """The shared blocks [C] that may be emptied, and their holders [H].

    `held` [H, C]; `rank` [H, C]: place in the holder's block table; `live` [H, C]: tokens to move.
    """

    layouts: Sequence[Layout]
    names: Ints
    held: Bools
    rank: Ints
    live: Ints

    @classmethod
    def of(cls, layouts: Sequence[Layout], holders: npt.NDArray[np.uint16]) -> _Shared | None:
        ranks = [np.flatnonzero(~layout.movable) for layout in layouts]
        names = [x.blocks[r] for x, r in zip(layouts, ranks, strict=True)]
        if not names or not sum(map(len, names)):
            return None
        row = np.repeat(np.arange(len(layouts)), [len(r) for r in ranks])
        found, column = np.unique(np.concatenate(names), return_inverse=True)
        held = np.zeros((len(layouts), len(found)), dtype=np.bool_)
        rank = np.zeros(held.shape, dtype=np.int64)
        live = np.zeros(held.shape, dtype=np.int64)
        held[row, column] = True
        rank[row, column] = np.concatenate(ranks)
        live[row, column] = np.concatenate(
            [
                np.count_nonzero(layout.grid[r] >= 0, axis=1)
                for layout, r in zip(layouts, ranks, strict=True)
            ]
        )
        num_holders = held.sum(axis=0)
        size = layouts[0].block_size
        usable = (num_holders == holders[found]) & (live.sum(axis=0) < num_holders * size)
        if not usable.any():
            return None
        return cls(layouts, found[usable], held[:, usable], rank[:, usable], live[:, usable])

    def components(self) -> Iterator[Ints]:
        """The connected components of columns with common holders; each is planned separately."""
        left = np.ones(len(self.names), dtype=np.bool_)
        while left.any():
            columns: Bools = np.zeros_like(left)
            columns[int(left.argmax())] = True
            while True:
                holders = self.held[:, columns].any(axis=1)
                grown: Bools = np.asarray(self.held[holders].any(axis=0))
                if np.array_equal(grown, columns):
                    break
                columns = grown
            yield np.flatnonzero(columns)
            left &= ~columns


@dataclass(frozen=True, slots=True)
class _OwnPlans:
    """Each request's own plan [H], without a group, and the places that it leaves.

    `moved`: tokens moved out of its sources; `fresh`: blocks taken; `fillable`: holes that may be
    filled; `spare`: other places that its next token may take; `before`, `after`: whether its next
    token takes a block without a plan, and with its own.
    """

    sources: Sequence[Ints]
    moved: Ints
    fresh: Ints
    fillable: Ints
    spare: Ints
    before: Ints
    after: Ints

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        plans: Sequence[RelocationPlan | None],
        live: Sequence[Ints],
        planner: PlannerName,
    ) -> _OwnPlans:
        size = layouts[0].block_size
        sources = [
            np.flatnonzero(np.isin(layout.blocks, plan.source_blocks)) if plan else NO_RANKS
            for layout, plan in zip(layouts, plans, strict=True)
        ]
        fresh = [plan.num_fresh_blocks if plan else 0 for plan in plans]
        counts = np.zeros((6, len(layouts)), dtype=np.int64)
        moved, taken, fillable, spare, before, after = counts
        taken[:] = fresh
        for h, (layout, n, leaving) in enumerate(zip(layouts, live, sources, strict=True)):
            stays = layout.writable.copy()
            stays[leaving] = False
            holes = int((size - n[stays]).sum())
            moved[h] = n[leaving].sum()
            if planner == "plug":
                fillable[h] = holes
            elif layout.recycles:
                spare[h] = holes
            else:
                spare[h] = np.count_nonzero(layout.grid[stays, -1] < 0)
            before[h] = takes_block(layout.grid, layout.writable, layout.recycles)
            free = fillable[h] + spare[h] + taken[h] * size - moved[h]
            after[h] = before[h] if plans[h] is None else free == 0
        return cls(sources, moved, taken, fillable, spare, before, after)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Columns to empty, and each holder's fresh blocks [H], those of its own plan included.

    `after` [H]: whether the holder's next token then takes a block.
    """

    gain: int
    moved: int
    columns: Ints
    fresh: Ints
    after: Ints


def plan_groups(
    layouts: Sequence[Layout],
    plans: Sequence[RelocationPlan | None],
    holders: npt.NDArray[np.uint16],
    planner: PlannerName,
    *,
    batch_size: int,
    headroom_blocks: int,
) -> tuple[list[RelocationPlan], int]:
    """Plan all groups with a gain; also returns the fresh blocks missing for further groups.

    `layouts`: the requests that may move, each with excess blocks; `plans`: each request's own
    plan, which a returned plan for it replaces and includes; `holders` [N]: the number of requests
    that hold each block. `batch_size` and `headroom_blocks`: what the own plans left over. The
    plans of a group must be applied together or not at all. Blocks are taken emptiest first; the
    choice that frees most wins, then the one that moves least.
    """
    shared = _Shared.of(layouts, holders)
    found: list[RelocationPlan] = []
    missing = 0
    if shared is None:
        return found, missing
    live = [count_live(layout.grid) for layout in layouts]
    own = _OwnPlans.of(layouts, plans, live, planner)
    sources_left, headroom_left = batch_size, headroom_blocks
    for component in shared.components():
        if sources_left <= 0:
            break
        choice = _choose(shared, own, component, sources_left, headroom_left)
        if choice is None:
            least = _choose(shared, own, component, sources_left, len(holders))
            if least is not None:
                missing += int((least.fresh - own.fresh).sum()) - headroom_left
            continue
        found += _plans_of(shared, own, live, choice, planner)
        sources_left -= int(shared.held[:, choice.columns].sum())
        headroom_left -= int((choice.fresh - own.fresh).sum())
    return found, missing


def _choose(
    shared: _Shared, own: _OwnPlans, component: Ints, batch_size: int, headroom_blocks: int
) -> _Choice | None:
    """The best choice for the entire component or one set of blocks with the same holders."""
    total = shared.live[:, component].sum(axis=0)
    order = component[np.argsort(total, kind="stable")]
    orders = [order]
    patterns, pattern = np.unique(shared.held[:, order], axis=1, return_inverse=True)
    if patterns.shape[1] > 1:
        orders += [order[pattern.ravel() == i] for i in range(patterns.shape[1])]
    choices = [
        _best_prefix(shared, own, columns[:batch_size], batch_size, headroom_blocks)
        for columns in orders
    ]
    best = max(choices, key=lambda choice: (choice.gain, -choice.moved))
    return best if best.gain > 0 else None


def _best_prefix(
    shared: _Shared, own: _OwnPlans, columns: Ints, batch_size: int, headroom_blocks: int
) -> _Choice:
    """The best choice that is a prefix of `columns`."""
    s = shared.layouts[0].block_size
    left = np.cumsum(shared.held[:, columns], axis=1)  # [H, k]: blocks that each holder leaves
    moved = np.cumsum(shared.live[:, columns], axis=1)
    moved_in_all = moved + own.moved[:, None]
    fresh = -(-np.maximum(moved_in_all - own.fillable[:, None], 0) // s)
    more = fresh - own.fresh[:, None]
    free = (own.fillable + own.spare)[:, None] + fresh * s - moved_in_all
    after = np.where(left > 0, free == 0, own.after[:, None])
    taken = more + np.maximum(after - own.after[:, None], 0)
    gain = np.arange(1, len(columns) + 1) - taken.sum(axis=0)
    allowed = (
        ((left == 0) | (left > taken)).all(axis=0)
        & (left.sum(axis=0) <= batch_size)
        & (more.sum(axis=0) <= headroom_blocks)
    )
    gain[~allowed] = 0
    best = int(np.argmax(gain))
    return _Choice(
        int(gain[best]),
        int(moved[:, best].sum()),
        columns[: best + 1],
        fresh[:, best].copy(),
        after[:, best].copy(),
    )


def _plans_of(
    shared: _Shared, own: _OwnPlans, live: Sequence[Ints], choice: _Choice, planner: PlannerName
) -> list[RelocationPlan]:
    """One plan per holder. The last one records the group's gain and the blocks that next tokens
    retake because of the group."""
    columns = choice.columns
    names = shared.names[columns]
    own_retaken = np.maximum(own.after - own.before, 0)
    retaken = np.maximum(choice.after - own.before, 0)
    plans: list[RelocationPlan] = []
    for h in np.flatnonzero(shared.held[:, columns].any(axis=1)).tolist():
        mine = shared.held[h, columns]
        sources = np.sort(np.concatenate([own.sources[h], shared.rank[h, columns[mine]]]))
        plan = lay_out(shared.layouts[h], planner, sources, int(choice.fresh[h]), live[h])
        freed = len(own.sources[h]) - int(own.fresh[h])
        plans.append(
            replace(
                plan,
                shared_blocks=tuple(names[mine].tolist()),
                freed_blocks=freed,
                retaken_blocks=int(min(own_retaken[h], retaken[h])),
            )
        )
    gain = len(columns) - int((choice.fresh - own.fresh).sum())
    plans[-1] = replace(
        plans[-1],
        freed_blocks=gain + (plans[-1].freed_blocks or 0),
        retaken_blocks=plans[-1].retaken_blocks + int(np.maximum(retaken - own_retaken, 0).sum()),
    )
    return plans
