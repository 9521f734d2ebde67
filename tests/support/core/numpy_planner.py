"""The planner of one request in plain numpy: the reference of `vtoken.core.planning.moves`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.core.planning.planner import Layout
from vtoken.wire import PlannerName


@dataclass(frozen=True)
class TwinPlan:
    """The fields of `RelocationPlan` that the planner chooses, as lists."""

    token_ids: list[int]
    source_slots: list[int]
    destination_slots: list[int]
    source_blocks: list[int]
    num_fresh_blocks: int
    blocks: list[int]
    retaken_blocks: int


def takes_block(layout: Layout) -> bool:
    """Whether the next token needs a new block."""
    n, s = layout.grid.shape
    occupied = np.flatnonzero(layout.grid.ravel() >= 0)
    extent = int(occupied[-1]) + 1 if len(occupied) else 0
    readonly = np.flatnonzero(~layout.writable)
    behind = int(readonly[-1] + 1) * s if len(readonly) else 0
    start = behind if behind > extent // s * s else extent
    if start < n * s:
        return False
    holes = (layout.grid < 0) & layout.writable[:, None]
    return not (layout.recycles and holes.ravel()[:extent].any())


def plan_twin(
    layout: Layout, planner: PlannerName, *, batch_size: int, headroom_blocks: int
) -> TwinPlan | None:
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
    before = int(takes_block(layout))
    rank, _, num_fresh, sources, after = max(choices, key=lambda choice: choice[:2])
    if len(sources) == 0 or rank // 2 + before <= 0:
        return None
    return _lay_out(layout, planner, np.sort(sources), num_fresh, live, max(after - before, 0))


def _choose(
    layout: Layout, planner: PlannerName, live: Ints, order: Ints, headroom_blocks: int
) -> tuple[int, int, int, Ints, int]:
    """The best prefix of `order`: twice (net blocks freed - 1 if the next token takes a block),
    plus 1 if it does; -moved, fresh blocks, sources, and whether the next token takes a block."""
    s = layout.block_size
    moved = np.cumsum(live[order])
    holes = np.where(layout.writable, s - live, 0)
    open_last = layout.writable & (layout.grid[:, -1] < 0)
    free = holes.sum() - np.cumsum(holes[order])
    if planner == "plug":
        fresh = -(-np.maximum(moved - free, 0) // s)
    else:
        fresh = -(-moved // s)
        if not layout.recycles:
            free = np.count_nonzero(open_last) - np.cumsum(open_last[order])
    after = (free + fresh * s - moved == 0).astype(np.int64)
    shed = np.arange(1, len(order) + 1) - fresh
    rank = np.where((shed > 0) & (fresh <= headroom_blocks), 2 * (shed - after) + after, -1000)
    best = int(np.argmax(rank))
    if rank[best] == -1000:
        return -1000, 0, 0, order[:0], 0
    return (
        int(rank[best]),
        -int(moved[best]),
        int(fresh[best]),
        order[: best + 1],
        int(after[best]),
    )


def _lay_out(
    layout: Layout, planner: PlannerName, sources: Ints, num_fresh: int, live: Ints, retaken: int
) -> TwinPlan:
    s = layout.block_size
    grid = layout.grid
    is_source = np.zeros(len(layout.blocks), dtype=np.bool_)
    is_source[sources] = True
    kept = np.flatnonzero(~is_source)
    source = _places(grid[sources] >= 0, sources, s)
    source = source[np.argsort(grid.ravel()[source])]
    fillable = kept[layout.writable[kept]] if planner == "plug" else kept[:0]
    fillable = fillable[np.argsort(-live[fillable], kind="stable")]
    partial = kept[live[kept] < s]
    holes = _places(grid[fillable] < 0, fillable, s)
    left_over = len(holes) - len(source)
    dense = bool(layout.writable[partial].all()) or not layout.recycles
    if len(fillable) and left_over > 0 and dense:
        last = int(fillable[-1])
        end = s
        if left_over < s:
            end = s - left_over
        elif not layout.recycles and grid[last, -1] >= 0:
            end = s - 1
        evacuated = last * s + end + np.flatnonzero(grid[last, end:] >= 0)
        holes = holes[(holes // s != last) | (holes % s < end)]
        source = np.concatenate([source, evacuated])
        if 0 < len(evacuated) == live[last]:  # one of them stays in the block
            holes = holes[holes != last * s]
            holes = np.insert(holes, len(source) - 1, last * s)
    taken = holes[: len(source)]
    num_out = len(source) - len(taken)
    fresh = -1 - np.arange(num_fresh, dtype=np.int64)

    after = live + np.bincount(taken // s, minlength=len(live))
    after -= np.bincount(source // s, minlength=len(live))
    filled = np.append(after[kept], np.clip(num_out + (fresh + 1) * s, 0, s))
    writable = np.append(layout.writable[kept], np.ones(num_fresh, dtype=np.bool_))
    order = np.lexsort((-filled, writable))
    if planner == "pack" and not layout.recycles:
        open_last = np.append(grid[kept, -1] < 0, filled[len(kept) :] < s)
        found = [i for i in order.tolist() if writable[i] and open_last[i]]
        if found:
            order = np.array([i for i in order.tolist() if i != found[-1]] + found[-1:])
    table = np.append(layout.blocks[kept], fresh)[order]

    def slots(places: Ints) -> Ints:
        found: Ints = layout.blocks[places // s] * s + places % s
        return found

    destinations = np.append(slots(taken), -1 - np.arange(num_out, dtype=np.int64))
    return TwinPlan(
        grid.ravel()[source].tolist(),
        slots(source).tolist(),
        destinations.tolist(),
        layout.blocks[sources].tolist(),
        num_fresh,
        table.tolist(),
        retaken,
    )


def _places(mask: Bools, blocks: Ints, block_size: int) -> Ints:
    """The places where `mask` [m, S] is set; its rows are the logical blocks `blocks` [m]."""
    rows, offsets = np.divmod(np.flatnonzero(mask), block_size)
    places: Ints = blocks[rows] * block_size + offsets
    return places
