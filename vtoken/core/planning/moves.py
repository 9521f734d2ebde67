"""Kernels of the relocation planner: which blocks to empty, and where their live tokens go.

They take the arrays of a `vtoken.core.planning.planner.Layout`: `grid` [n, S] live token ids by
place, -1 elsewhere; `blocks`, `movable`, `writable`, `live` [n]. r is a logical block. K: the
blocks that stay; holes(r) = S - live[r].

The rule, for s sources of which `moved` tokens leave, and d fresh blocks:
1. plug:  d = ceil(max(moved - sum of holes(r) over writable r in K, 0) / S)
   pack:  d = ceil(moved / S)
2. free = places left in writable blocks that the next token may take, see `_best_prefix`
   after = [free = 0]: the next token takes a block;  before: the same without the plan
3. gain = (s - d) - (after - before) > 0,  s - d > 0,  s <= B,  d <= headroom
"""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.base.compiled import kernel


@kernel
def count_live(grid: Ints) -> Ints:
    """live[r] = |{o : grid[r, o] >= 0}|."""
    n, size = grid.shape
    live = np.zeros(n, dtype=np.int64)
    for r in range(n):
        for o in range(size):
            if grid[r, o] >= 0:
                live[r] += 1
    return live


@kernel
def takes_block(grid: Ints, writable: Bools, recycles: bool) -> bool:
    """Whether the next single token has no place in the blocks held.

    With E = 1 + the highest live place, it goes to E or, if further, behind the last read-only
    block; with `recycles`, into any hole of a writable block below E instead.
    """
    n, size = grid.shape
    last, end = n - 1, 0  # the last live token is at `end` - 1 of the block `last`
    while last >= 0 and end == 0:
        for o in range(size):
            if grid[last, o] >= 0:
                end = o + 1
        if end == 0:
            last -= 1
    first = last if 0 < end < size else last + 1  # the block that contains E
    if first < n and writable[n - 1]:
        return False
    if recycles:
        for r in range(last + 1):
            if writable[r]:
                for o in range(end if r == last else size):
                    if grid[r, o] < 0:
                        return False
    return True


@kernel
def _best_prefix(
    grid: Ints,
    writable: Bools,
    live: Ints,
    order: Ints,
    plug: bool,
    recycles: bool,
    batch_size: int,
    headroom: int,
) -> tuple[int, int, int, int, int]:
    """The best prefix of `order` as sources: value = s - d - after, moved, s, d, after.

    Among equal values, the prefix that frees more blocks, because it leaves no hole. s = 0: no
    prefix is allowed.

    `holes`: holes filled before a fresh block is taken. `spare`: places in blocks that `pack` does
    not change and the next token may take: holes of writable blocks with `recycles`, else writable
    blocks whose last slot is open. Then free = holes + spare + d * S - moved. This is exact:
    `lay_out` puts an open last slot at the end of the table if there is any.
    """
    n, size = grid.shape
    holes, spare, moved = 0, 0, 0
    for r in range(n):
        if writable[r]:
            if plug:
                holes += size - live[r]
            elif recycles:
                spare += size - live[r]
            elif grid[r, size - 1] < 0:
                spare += 1
    best, best_moved, num_sources, best_fresh, best_after = 0, 0, 0, 0, 0
    for i in range(min(batch_size, len(order))):
        r = order[i]
        moved += live[r]
        if writable[r]:
            if plug:
                holes -= size - live[r]
            elif recycles:
                spare -= size - live[r]
            elif grid[r, size - 1] < 0:
                spare -= 1
        fresh = (max(moved - holes, 0) + size - 1) // size
        if fresh > headroom:
            continue
        after = 1 if holes + spare + fresh * size - moved == 0 else 0
        value = i + 1 - fresh - after
        if i + 1 > fresh and (
            num_sources == 0 or value > best or (value == best and after > best_after)
        ):
            best, best_moved, num_sources = value, moved, i + 1
            best_fresh, best_after = fresh, after
    return best, best_moved, num_sources, best_fresh, best_after


@kernel
def _counting_sort(key: Ints, num_keys: int) -> Ints:
    """The indices of `key` [m] in stable ascending order of their keys 0..num_keys-1, without those
    of negative keys."""
    first = np.zeros(num_keys + 1, dtype=np.int64)
    for k in key:
        if k >= 0:
            first[k + 1] += 1
    for k in range(num_keys):
        first[k + 1] += first[k]
    order = np.empty(first[num_keys], dtype=np.int64)
    for i in range(len(key)):
        k = key[i]
        if k >= 0:
            order[first[k]] = i
            first[k] += 1
    return order


@kernel
def _open_end(
    grid: Ints,
    writable: Bools,
    live: Ints,
    is_source: Bools,
    fillable: Ints,
    num_movers: int,
    recycles: bool,
) -> int:
    """The offset x from which the last block of `fillable` is emptied and no hole filled, so that
    free places follow the last token. S: the block stays as it is.

    With H holes in `fillable`, F = H - movers remain. 0 < F < S: with x = S - F the block is open
    at its end and the others are full. F >= S: other blocks keep holes; without recycling, the
    token in the last slot leaves to make a place for the next token. With recycling the next token
    may take any hole, and nothing more moves if read-only blocks keep holes, because the layout
    would not become dense.
    """
    size = int(grid.shape[1])
    if len(fillable) == 0:
        return size
    free = -num_movers
    for r in fillable:
        free += size - live[r]
    if free <= 0:
        return size
    if recycles:
        for r in range(len(live)):
            if not is_source[r] and not writable[r] and live[r] < size:
                return size
    if free < size:
        return size - free
    if not recycles and grid[fillable[len(fillable) - 1], size - 1] >= 0:
        return size - 1
    return size


@kernel
def lay_out(
    grid: Ints,
    blocks: Ints,
    writable: Bools,
    live: Ints,
    is_source: Bools,
    num_fresh: int,
    plug: bool,
    recycles: bool,
) -> tuple[Ints, Ints]:
    """The moves [3, k] (token ids, slots, new slots) and the new block table [n - s + d].

    Tokens of sources move in id order, then those that leave the open end. They fill holes from the
    fullest remaining block to the emptiest, then fresh blocks from the front; the i-th fresh block
    is -1 - i, its slots -1 - (i * S + offset). If every token of the last block leaves its open
    end, one of them goes to the block's first slot: a block that stays is never empty. The table
    has read-only blocks first, the others by descending occupancy; without recycling, a block with
    an open last slot is last, if any exists.
    """
    n, size = grid.shape
    num_sources, num_movers = 0, 0
    key = np.full(n + num_fresh, -1, dtype=np.int64)
    for r in range(n):
        if is_source[r]:
            num_sources += 1
            num_movers += live[r]
        elif plug and writable[r]:
            key[r] = size - live[r]
    fillable = _counting_sort(key, size + 1)
    end = _open_end(grid, writable, live, is_source, fillable, num_movers, recycles)
    last = fillable[len(fillable) - 1] if len(fillable) > 0 else -1
    num_moves = num_movers
    for o in range(end, size):
        if grid[last, o] >= 0:
            num_moves += 1

    moves = np.empty((3, num_moves), dtype=np.int64)
    k = 0
    for r in range(n):
        if is_source[r]:
            for o in range(size):
                if grid[r, o] >= 0:
                    moves[0, k] = grid[r, o]
                    moves[1, k] = blocks[r] * size + o
                    k += 1
    moves[:2, :k] = moves[:2, np.argsort(moves[0, :k])]
    filled = np.zeros(n + num_fresh, dtype=np.int64)
    filled[:n] = live
    for o in range(end, size):
        if grid[last, o] >= 0:
            moves[0, k] = grid[last, o]
            moves[1, k] = blocks[last] * size + o
            filled[last] -= 1
            k += 1
    num_left, first = num_moves, 0
    if num_moves > num_movers and filled[last] == 0:
        num_left, first = num_moves - 1, 1
        moves[2, num_left] = blocks[last] * size
        filled[last] = 1

    k = 0
    for r in fillable:
        for o in range(first if r == last else 0, end if r == last else size):
            if k == num_left:
                break
            if grid[r, o] < 0:
                moves[2, k] = blocks[r] * size + o
                filled[r] += 1
                k += 1
    first_out = k
    for i in range(n, n + num_fresh):
        filled[i] = min(num_moves - k, size)
        for _ in range(filled[i]):
            moves[2, k] = first_out - 1 - k
            k += 1

    for r in range(n):
        if is_source[r]:
            key[r] = -1
        else:
            key[r] = size - filled[r] + (size + 1 if writable[r] else 0)
    for i in range(n, n + num_fresh):
        key[i] = size - filled[i] + size + 1
    order = _counting_sort(key, 2 * size + 2)
    if not plug and not recycles:
        _open_last(grid, writable, filled, order)
    table = np.empty(len(order), dtype=np.int64)
    for i in range(len(order)):
        r = order[i]
        table[i] = blocks[r] if r < n else -1 - (r - n)
    return moves, table


@kernel
def _open_last(grid: Ints, writable: Bools, filled: Ints, order: Ints) -> None:
    """Move the emptiest block with an open last slot, if any, to the end of `order`.

    `order` [m]: unchanged blocks and, from n on, fresh ones, filled from the front.
    """
    n, size = grid.shape
    for i in range(len(order) - 1, -1, -1):
        r = order[i]
        if r < n and not writable[r]:
            return
        if (r >= n and filled[r] < size) or (r < n and grid[r, size - 1] < 0):
            for j in range(i, len(order) - 1):
                order[j] = order[j + 1]
            order[len(order) - 1] = r
            return


@kernel
def _best_order(
    grid: Ints,
    writable: Bools,
    live: Ints,
    emptiest: Ints,
    readonly: Ints,
    plug: bool,
    recycles: bool,
    batch_size: int,
    headroom: int,
) -> tuple[int, int, int, int, int, int]:
    """The better `_best_prefix` of the orders `emptiest` and `readonly` (may be empty): the higher
    value, then more blocks freed, then fewer tokens moved. The last number: 1 for `readonly`."""
    one = _best_prefix(grid, writable, live, emptiest, plug, recycles, batch_size, headroom)
    if len(readonly) > 0:
        two = _best_prefix(grid, writable, live, readonly, plug, recycles, batch_size, headroom)
        value, other = one[0] * 2 + one[4], two[0] * 2 + two[4]
        if two[2] > 0 and (one[2] == 0 or other > value or (other == value and two[1] < one[1])):
            return two[0], two[1], two[2], two[3], two[4], 1
    return one[0], one[1], one[2], one[3], one[4], 0


@kernel
def plan(
    grid: Ints,
    blocks: Ints,
    movable: Bools,
    writable: Bools,
    plug: bool,
    recycles: bool,
    batch_size: int,
    headroom: int,
) -> tuple[Ints, Ints, Ints, Ints]:
    """One request's plan: `[s, d, retaken, missing, passed over]`, moves, table, source blocks.

    s = 0: no plan, and the arrays are empty; `missing`: fresh blocks beyond `headroom` that a plan
    without that bound would take. `retaken`: max(after - before, 0). `passed over`: blocks with a
    hole that are not movable. Candidates are the movable blocks with a hole, emptiest first or, for
    `plug`, read-only ones first.
    """
    n, size = grid.shape
    found = np.zeros(5, dtype=np.int64)
    none = np.empty(0, dtype=np.int64)
    live = count_live(grid)
    key = np.full(n, -1, dtype=np.int64)
    num_candidates, num_readonly = 0, 0
    for r in range(n):
        if live[r] < size:
            if movable[r]:
                key[r] = live[r]
                num_candidates += 1
                num_readonly += 0 if writable[r] else 1
            else:
                found[4] += 1
    order = _counting_sort(key, size)
    readonly = none
    if plug and num_readonly > 0:
        for i in range(num_candidates):
            key[i] = 1 if writable[order[i]] else 0
        readonly = order[_counting_sort(key[:num_candidates], 2)]
    before = 1 if takes_block(grid, writable, recycles) else 0
    best = _best_order(grid, writable, live, order, readonly, plug, recycles, batch_size, headroom)
    if best[2] == 0 or best[0] + before <= 0:
        most = _best_order(grid, writable, live, order, readonly, plug, recycles, batch_size, n)
        if most[2] > 0 and most[0] + before > 0:
            found[3] = most[3] - headroom
        return found, np.empty((3, 0), dtype=np.int64), none, none
    if best[5] == 1:
        order = readonly
    is_source = np.zeros(n, dtype=np.bool_)
    for i in range(best[2]):
        is_source[order[i]] = True
    moves, table = lay_out(grid, blocks, writable, live, is_source, best[3], plug, recycles)
    found[0], found[1], found[2] = best[2], best[3], max(best[4] - before, 0)
    return found, moves, table, blocks[is_source]


@kernel
def bind_fresh(slots: Ints, table: Ints, fresh: Ints, size: int) -> tuple[Ints, Ints]:
    """`slots` [k] and `table` [m] of a plan with `fresh[i]` as the i-th fresh block."""
    new_slots, new_table = slots.copy(), table.copy()
    # First place and slot of the last slot's fresh block; saves a division per slot.
    first, start = 0, fresh[0] * size
    for i in range(len(slots)):
        if slots[i] < 0:
            place = -1 - slots[i]
            if not first <= place < first + size:
                first = place - place % size
                start = fresh[first // size] * size
            new_slots[i] = start + place - first
    for i in range(len(table)):
        if table[i] < 0:
            new_table[i] = fresh[-1 - table[i]]
    return new_slots, new_table
