"""The kernels that change the token tables: loops over `vtoken.core.tables.columns`.

Names: S block size; p place, a physical index; i logical block; b block; slot = b * S + p % S.
State of one token, for id t and place p of one row, with q = gap * S + p:

    index_of[t] = q       t is live at p                <=>  token_at[p] = t
    index_of[t] = -2 - q  t is dead, its K/V still at p <=>  token_at[p] = -2 - t
    index_of[t] = -1      t is dead and has no slot          token_at[p] = -1: nothing written
    parked_at[t] = h      host slot h has a copy of its K/V; -1: there is none

q counts from the start of the row's segment, where `gap` blocks have left at the front. So a block
that leaves near the front moves the few blocks before it, not the many behind it:

    segment        0     1     2     3     4     5     6        gap = 2, num_blocks = 4,
                |  -  |  -  | a b | . c | d e | f . |     |     capacity = 7
    place p                   0 1   2 3   4 5   6 7             S = 2; c: p = 3, q = 7
    block 3 loses c and leaves: block 2 moves to 3, and gap = 3
                |  -  |  -  |  -  | a b | d e | f . |     |     d: p = 4 -> 2, q = 8 as before

Equations that hold before and after every kernel, for each row:

    num_live = |{t : index_of[t] >= 0}|     extent = 1 + max {p : token_at[p] >= 0}, 0 if none
    block_live[i] = |{p in block i : token_at[p] >= 0}|     num_full = |{i : block_live[i] = S}|
    num_dead_slots = |{p : token_at[p] < -1}|               every place below front is live
    num_copies = |{t : parked_at[t] >= 0}|                  num_parked: those of them that are dead
    naive_live[k] = |{t : t // S = k, index_of[t] >= 0}|     num_naive = |{k : naive_live[k] > 0}|

and for the pool: readers[slot] = live tokens in the slot, over all rows; live[b] = slots of b with
a reader; holders[b] = rows that hold b; counts = [held blocks, slots with a reader,
blocks with several holders].

`cols` are the `TableArrays` of the columns, `pool` the pool's `PoolArrays`. A kernel that refuses a
request returns a code, writes the numbers of the error message to `detail` [3] and leaves that
request unchanged.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.compiled import kernel
from vtoken.wire import FLAG_SHARED as SHARED
from vtoken.wire import FLAG_USED as USED

# Return codes.
DONE, NO_CAPACITY, NO_PLACE, OCCUPIED, SHRANK = 0, 1, 2, 3, 4
UNKNOWN, DEAD, MISCOUNTED, NEWEST = 5, 6, 7, 8
DUPLICATE_BLOCK, OUTSIDE, TAKEN, LOST = 9, 10, 11, 12
NO_BLOCK = 13
PROTECTED = 14
CROWDED = 15
NO_COPY, NO_HOLE = 16, 17

MAX_HOLDERS = 65_535  # `holders` and `readers` are uint16

# Indices of `counted` in `append`.
WRITTEN, RECYCLED = 0, 1


# ---------------------------------------------------------------- the pool


@kernel
def _hold(b, number, pool):
    if pool.holders[b] == 0:
        pool.counts[0] += 1
        pool.usage[b] = USED
    else:
        pool.counts[2] += pool.holders[b] == 1
        pool.usage[b] = USED | SHARED
    pool.holders[b] += 1
    pool.owner[b] = number


@kernel
def _drop(b, number, pool):
    pool.holders[b] -= 1
    if pool.holders[b] == 0:
        pool.counts[0] -= 1
        pool.usage[b] = 0
        pool.owner[b] = 0
        return
    if pool.holders[b] == 1:
        pool.counts[2] -= 1
        pool.usage[b] = USED
    if pool.owner[b] == number:
        pool.owner_stale[b] = True


@kernel
def _add_reader(slot, s, pool):
    if pool.readers[slot] == 0:
        pool.live[slot // s] += 1
        pool.counts[1] += 1
    pool.readers[slot] += 1


@kernel
def _remove_reader(slot, s, pool):
    pool.readers[slot] -= 1
    if pool.readers[slot] == 0:
        pool.live[slot // s] -= 1
        pool.counts[1] -= 1


# ---------------------------------------------------------------- growth


@kernel
def _append_start(fact, s, cols):
    """The first place behind the last live token and behind all read-only blocks."""
    start = fact.extent
    base = fact.first_block + fact.gap
    for i in range(start // s, fact.num_blocks):
        if cols.readonly[base + i]:
            start = (i + 1) * s
    return start


@kernel
def append(first, rows, totals, added, s, cols, pool, slots, starts, written, counted, detail):
    """Grow requests `rows` [k], from the `first`-th on, to `totals` [k] tokens.

    Each gains the blocks added.values[added.starts[j]:added.starts[j + 1]]. A single new token goes
    into the row's `hole`, if there is one. Writes the new tokens' slots to `slots`, with offsets in
    `starts` [k + 1]; to `written` the counted[WRITTEN] blocks that requests which have evicted
    write to; and counted[RECYCLED], the number of holes filled. Returns a code and the index of the
    request at which it stopped.
    """
    for j in range(first, len(rows)):
        r = rows[j]
        fact = cols.facts[r]
        num_new = totals[j] - fact.num_tokens
        num_added = added.starts[j + 1] - added.starts[j]
        if num_new < 0:
            return SHRANK, j
        if (
            totals[j] > fact.token_capacity
            or fact.gap + fact.num_blocks + num_added > fact.block_capacity
            or starts[j] + num_new > len(slots)
        ):
            return NO_CAPACITY, j
        for at in range(added.starts[j], added.starts[j + 1]):
            if added.values[at] < 0 or added.values[at] >= len(pool.holders):
                detail[0] = added.values[at]
                return NO_BLOCK, j
            if pool.holders[added.values[at]] == MAX_HOLDERS:
                detail[0] = added.values[at]
                return CROWDED, j
        base, shift = fact.first_block + fact.gap, fact.gap * s
        place = fact.extent
        if fact.virtual:
            alone = num_new == 1 and fact.hole >= 0
            place = fact.hole if alone else _append_start(fact, s, cols)
        if place + num_new > (fact.num_blocks + num_added) * s:
            detail[0], detail[1], detail[2] = num_new, place, fact.num_blocks + num_added
            return NO_PLACE, j
        for p in range(place, place + num_new):
            if p < fact.num_blocks * s and cols.token_at[base * s + p] >= 0:
                detail[0] = p
                return OCCUPIED, j
        for at in range(added.starts[j], added.starts[j + 1]):
            i = base + fact.num_blocks
            cols.block_id[i] = added.values[at]
            cols.block_live[i] = 0
            cols.readonly[i] = False
            for p in range(i * s, (i + 1) * s):
                cols.token_at[p] = -1
            _hold(added.values[at], fact.number, pool)
            fact.num_blocks += 1
        if fact.virtual and num_new == 1 and place == fact.hole:
            counted[RECYCLED] += 1
            fact.num_recycled += 1
            fact.hole = -1
        put = starts[j]
        for p in range(place, place + num_new):
            at = base * s + p
            i = base + p // s
            b = cols.block_id[i]
            t = fact.num_tokens
            if cols.token_at[at] < -1:
                cols.index_of[fact.first_token - 2 - cols.token_at[at]] = -1
                fact.num_dead_slots -= 1
            cols.token_at[at] = t
            cols.index_of[fact.first_token + t] = shift + p
            cols.block_live[i] += 1
            fact.num_full += cols.block_live[i] == s
            k = (fact.first_token + t) // s
            fact.num_naive += cols.naive_live[k] == 0
            cols.naive_live[k] += 1
            slot = b * s + p % s
            _add_reader(slot, s, pool)
            slots[put] = slot
            put += 1
            if fact.virtual and (p == place or p % s == 0):
                written[counted[WRITTEN]] = b
                counted[WRITTEN] += 1
            fact.num_tokens += 1
        fact.num_live += num_new
        if num_new:
            fact.extent = max(fact.extent, place + num_new)
        starts[j + 1] = put
    return DONE, len(rows)


@kernel
def num_private(rows, cols, holders, out):
    """Count the blocks of each row that it alone holds into `out` [k]."""
    for j in range(len(rows)):
        fact = cols.facts[rows[j]]
        out[j] = 0
        first = fact.first_block + fact.gap
        for i in range(first, first + fact.num_blocks):
            out[j] += holders[cols.block_id[i]] == 1


@kernel
def truncate(rows, totals, s, cols, pool):
    """Remove the newest tokens of the requests `rows` [k], which keep `totals` [k]: the inverse of
    `append`. Their places are as if never written; no block leaves a table.

    Refuses, without any change, a total that is negative or beyond the row's tokens. Returns a code
    and the index of the request at fault.
    """
    for j in range(len(rows)):
        if totals[j] < 0 or totals[j] > cols.facts[rows[j]].num_tokens:
            return SHRANK, j
    for j in range(len(rows)):
        fact = cols.facts[rows[j]]
        segment, first = fact.first_block * s, fact.first_token
        for t in range(totals[j], fact.num_tokens):
            q = cols.index_of[first + t]
            cols.index_of[first + t] = -1
            if q < -1:
                cols.token_at[segment - 2 - q] = -1
                fact.num_dead_slots -= 1
            if q < 0:
                continue
            i = fact.first_block + q // s
            cols.token_at[segment + q] = -1
            fact.num_full -= cols.block_live[i] == s
            cols.block_live[i] -= 1
            k = (first + t) // s
            cols.naive_live[k] -= 1
            fact.num_naive -= cols.naive_live[k] == 0
            _remove_reader(cols.block_id[i] * s + q % s, s, pool)
            fact.num_live -= 1
            fact.front = min(fact.front, q - fact.gap * s)
        fact.num_tokens = totals[j]
        fact.hole = -1
        base = segment + fact.gap * s
        while fact.extent > 0 and cols.token_at[base + fact.extent - 1] < 0:
            fact.extent -= 1
    return DONE, len(rows)


@kernel
def _next_hole(fact, s, cols):
    """The first dead place of the row in a block that is not read-only; -1: there is none."""
    base = fact.first_block + fact.gap
    p = fact.front
    while p < fact.extent and cols.token_at[base * s + p] >= 0:
        p += 1
    fact.front = p
    while p < fact.extent:
        if cols.readonly[base + p // s]:
            p = (p // s + 1) * s
        elif cols.token_at[base * s + p] >= 0:
            p += 1
        else:
            return p
    return -1


@kernel
def growth(rows, num_new, recycling, s, cols, out):
    """Write how many blocks beyond those held each row takes for its `num_new` [k] more tokens to
    `out` [k]; with `recycling` the first one takes a hole, if there is one.
    """
    for j in range(len(rows)):
        fact = cols.facts[rows[j]]
        start = fact.extent
        if fact.virtual:
            has_hole = recycling and fact.extent != fact.num_live and _next_hole(fact, s, cols) >= 0
            start = fact.extent - 1 if has_hole else _append_start(fact, s, cols)
        out[j] = max(0, (start + num_new[j] + s - 1) // s - fact.num_blocks)


@kernel
def choose_places(s, recycling, num_rows, cols, next_extent, start_of):
    """Choose where each request writes next: a hole in `facts.hole`, or `start_of`.

    By row, `start_of` is the first place of appended tokens and `next_extent` the number of places
    that a single new token requires. Returns whether a request with holes holds more blocks than
    its live tokens and the next one need.
    """
    spare = False
    for r in range(num_rows):
        fact = cols.facts[r]
        fact.hole = -1
        start = fact.extent
        if fact.virtual:
            start = _append_start(fact, s, cols)
            if fact.extent != fact.num_live:
                spare = spare or fact.num_blocks > fact.num_live // s + 1
                if recycling:
                    fact.hole = _next_hole(fact, s, cols)
        start_of[r] = start
        next_extent[r] = fact.extent if fact.hole >= 0 else start + 1
    return spare


# ---------------------------------------------------------------- eviction


@kernel
def num_live_in(rows, spans, cols, out):
    """Count the live tokens within each row's spans (start, end pairs) into `out` [k]."""
    for j in range(len(rows)):
        fact = cols.facts[rows[j]]
        out[j] = 0
        for span in range(spans.starts[j], spans.starts[j + 1], 2):
            for t in range(spans.values[span], min(spans.values[span + 1], fact.num_tokens)):
                out[j] += cols.index_of[fact.first_token + t] >= 0


@kernel
def evict(rows, victims, num_due, spans, s, cols, pool, codes, num_emptied):
    """Evict the `victims` of request j, ascending token ids, of each request rows[j].

    `num_due` [k]: the required number of victims, the newest token excluded; -1: any. No victim may
    be inside the protected (start, end) pairs of `spans` [k]. Writes `codes` [k], the reason a
    request was refused, and `num_emptied` [k], its blocks that lost their last live token.
    """
    for j in range(len(rows)):
        fact = cols.facts[rows[j]]
        codes[j] = DONE
        num_emptied[j] = 0
        low, high = victims.starts[j], victims.starts[j + 1]
        last = -1
        span = spans.starts[j]
        for at in range(low, high):
            t = victims.values[at]
            if t <= last or t >= fact.num_tokens:
                codes[j] = UNKNOWN
                break
            while span < spans.starts[j + 1] and spans.values[span + 1] <= t:
                span += 2
            if span < spans.starts[j + 1] and spans.values[span] <= t:
                codes[j] = PROTECTED
                break
            if cols.index_of[fact.first_token + t] < 0:
                codes[j] = DEAD
                break
            last = t
        if codes[j] == DONE and num_due[j] >= 0:
            if high - low != num_due[j]:
                codes[j] = MISCOUNTED
            elif last == fact.num_tokens - 1:
                codes[j] = NEWEST
        if codes[j] != DONE or low == high:
            continue
        fact.virtual = 1
        for at in range(low, high):
            t = victims.values[at]
            q = cols.index_of[fact.first_token + t]
            i = fact.first_block + q // s
            cols.index_of[fact.first_token + t] = -2 - q
            cols.token_at[fact.first_block * s + q] = -2 - t
            fact.num_full -= cols.block_live[i] == s
            cols.block_live[i] -= 1
            num_emptied[j] += cols.block_live[i] == 0
            k = (fact.first_token + t) // s
            cols.naive_live[k] -= 1
            fact.num_naive -= cols.naive_live[k] == 0
            fact.num_parked += cols.parked_at[fact.first_token + t] >= 0
            _remove_reader(cols.block_id[i] * s + q % s, s, pool)
            fact.front = min(fact.front, q - fact.gap * s)
        fact.num_dead_slots += high - low
        fact.num_live -= high - low
        base = (fact.first_block + fact.gap) * s
        while fact.extent > 0 and cols.token_at[base + fact.extent - 1] < 0:
            fact.extent -= 1


# ---------------------------------------------------------------- parking


@kernel
def note_copies(r, ids, hosts, cols):
    """Note that the dead tokens `ids` [k] of row `r` have their first copy, in `hosts` [k]."""
    fact = cols.facts[r]
    for n in range(len(ids)):
        cols.parked_at[fact.first_token + ids[n]] = hosts[n]
    fact.num_copies += len(ids)
    fact.num_parked += len(ids)


@kernel
def drop_copies(rows, ids, cols):
    """Give up the copies of token ids[n] of row rows[n], for every n [k]; each has one.

    Returns how many of these tokens are dead.
    """
    num_parked = 0
    for n in range(len(ids)):
        fact = cols.facts[rows[n]]
        at = fact.first_token + ids[n]
        cols.parked_at[at] = -1
        fact.num_copies -= 1
        if cols.index_of[at] < 0:
            fact.num_parked -= 1
            num_parked += 1
    return num_parked


@kernel
def open_places(r, s, cols, out):
    """Write the places of row `r` that a token may be restored to, ascending, to `out` [k]: not
    live, in blocks that are not read-only. Returns their number, at most k.
    """
    fact = cols.facts[r]
    base = fact.first_block + fact.gap
    found = 0
    for i in range(fact.num_blocks):
        if cols.readonly[base + i] or cols.block_live[base + i] == s:
            continue
        for p in range(i * s, (i + 1) * s):
            if found == len(out):
                return found
            if cols.token_at[base * s + p] < 0:
                out[found] = p
                found += 1
    return found


@kernel
def restore(r, ids, places, added, s, cols, pool, slots, detail):
    """Make the parked tokens `ids` [k] of row `r`, ascending, live at `places` [k], ascending.

    The row gains the blocks `added` behind those that it has; places may be in them. Refuses,
    without any change: a token that is live or has no copy; a place outside the row's blocks, in a
    read-only one, or with a live token. Writes the tokens' slots to `slots` [k]. Returns a code.

        places      | a - b . |                letters: live; -: dead, .: nothing written
        restored    | a x b y | z . . . |      x in a hole, y behind the last, z in a new block
    """
    fact = cols.facts[r]
    first, base = fact.first_token, fact.first_block + fact.gap
    last_id, last_place = -1, -1
    for n in range(len(ids)):
        t, p = ids[n], places[n]
        detail[0], detail[1] = t, p
        if t <= last_id or t >= fact.num_tokens:
            return UNKNOWN
        if cols.index_of[first + t] >= 0 or cols.parked_at[first + t] < 0:
            return NO_COPY
        if p <= last_place or p >= (fact.num_blocks + len(added)) * s:
            return NO_HOLE
        if p < fact.num_blocks * s and (
            cols.token_at[base * s + p] >= 0 or cols.readonly[base + p // s]
        ):
            return NO_HOLE
        last_id, last_place = t, p
    for n in range(len(added)):
        i = base + fact.num_blocks
        cols.block_id[i] = added[n]
        cols.block_live[i] = 0
        cols.readonly[i] = False
        for at in range(i * s, (i + 1) * s):
            cols.token_at[at] = -1
        _hold(added[n], fact.number, pool)
        fact.num_blocks += 1
    for n in range(len(ids)):
        t, p = ids[n], places[n]
        q = cols.index_of[first + t]
        if q < -1:  # its old K and V are still in a slot
            cols.token_at[fact.first_block * s - 2 - q] = -1
            fact.num_dead_slots -= 1
        at, i = base * s + p, base + p // s
        if cols.token_at[at] < -1:
            cols.index_of[first - 2 - cols.token_at[at]] = -1
            fact.num_dead_slots -= 1
        cols.token_at[at] = t
        cols.index_of[first + t] = fact.gap * s + p
        cols.block_live[i] += 1
        fact.num_full += cols.block_live[i] == s
        k = (first + t) // s
        fact.num_naive += cols.naive_live[k] == 0
        cols.naive_live[k] += 1
        slots[n] = cols.block_id[i] * s + p % s
        _add_reader(slots[n], s, pool)
        fact.extent = max(fact.extent, p + 1)
    fact.num_live += len(ids)
    fact.num_parked -= len(ids)
    fact.num_restored += len(ids)
    fact.hole = -1
    return DONE


# ---------------------------------------------------------------- relocation


@kernel
def relocate(r, ids, slots, blocks, s, cols, pool, rank, old_rank, dropped, detail):
    """Move live tokens `ids` [k] of row `r` to `slots` [k] and set its block table to `blocks` [n].

    The row acquires blocks that are new in `blocks`; missing ones are dropped and written to
    `dropped` in the order of the old table. Refuses, without any change: a duplicate block; a moved
    token that is not live; a destination that is outside `blocks`, duplicate, or occupied by a live
    token; a live token left in a dropped block. `rank`, `old_rank` [N]: scratch, -1 before and
    after. Requires capacity for `blocks`; closes the gap. Returns a code and the number of dropped
    blocks.

        old table       A       B       C       D          letters: live; -: dead, its K/V there
        token_at    | a - b | c d e | - f - | g . . |      .: nothing written

        f moves into the hole of A and g into the fresh block F; blocks = A, B, F:

        new table       A       B       F
        token_at    | a f b | c d e | g . . |              C and D hold no live token: dropped
    """
    fact = cols.facts[r]
    segment, first = fact.first_block, fact.first_token
    base = segment + fact.gap
    code = DONE
    for n in range(fact.num_blocks):
        old_rank[cols.block_id[base + n]] = n
    num_ranked = 0
    for n in range(len(blocks)):
        if blocks[n] < 0 or blocks[n] >= len(rank):
            code, detail[0] = NO_BLOCK, blocks[n]
            break
        if rank[blocks[n]] >= 0:
            code = DUPLICATE_BLOCK
            break
        rank[blocks[n]] = n
        num_ranked += 1
    new_at = np.full(len(blocks) * s, -1, dtype=np.int32)
    num_left = 0  # live tokens left in dropped blocks
    if code == DONE:
        for n in range(fact.num_blocks):
            if rank[cols.block_id[base + n]] < 0:
                num_left += cols.block_live[base + n]
    num_marked = 0
    if code == DONE:
        for n in range(len(ids)):
            t = ids[n]
            if t < 0 or t >= fact.num_tokens or cols.index_of[first + t] < 0:
                code = DEAD
                break
            b = slots[n] // s
            if slots[n] < 0 or b >= len(rank) or rank[b] < 0:
                code, detail[0] = OUTSIDE, b
                break
            o = slots[n] % s
            to = rank[b] * s + o
            if new_at[to] >= 0 or (
                old_rank[b] >= 0 and cols.token_at[(base + old_rank[b]) * s + o] >= 0
            ):
                code = TAKEN
                break
            new_at[to] = t
            q = cols.index_of[first + t]
            num_left -= rank[cols.block_id[segment + q // s]] < 0
            cols.index_of[first + t] = -2 - q  # marks the token as moved; undone below
            num_marked += 1
        for n in range(num_marked):
            cols.index_of[first + ids[n]] = -2 - cols.index_of[first + ids[n]]
    if code == DONE and num_left:
        code, detail[0] = LOST, fact.num_live - num_left
    if code != DONE:
        for n in range(num_ranked):
            rank[blocks[n]] = -1
        for n in range(fact.num_blocks):
            old_rank[cols.block_id[base + n]] = -1
        return code, 0
    for n in range(len(blocks)):
        if old_rank[blocks[n]] < 0:
            _hold(blocks[n], fact.number, pool)
    for n in range(len(ids)):
        q = cols.index_of[first + ids[n]]
        _remove_reader(cols.block_id[segment + q // s] * s + q % s, s, pool)
        cols.token_at[segment * s + q] = -1
        _add_reader(slots[n], s, pool)
    num_dropped = 0
    for n in range(fact.num_blocks):
        b = cols.block_id[base + n]
        to = rank[b]
        for o in range(s):
            t = cols.token_at[(base + n) * s + o]
            if t == -1:
                continue
            if to < 0:
                cols.index_of[first - 2 - t] = -1  # dead: a dropped block holds no live token
            elif t >= 0:
                new_at[to * s + o] = t
                cols.index_of[first + t] = to * s + o
            elif new_at[to * s + o] >= 0:
                cols.index_of[first - 2 - t] = -1  # a moved token overwrites its slot
            else:
                new_at[to * s + o] = t
                cols.index_of[first - 2 - t] = -2 - (to * s + o)
        if to < 0:
            dropped[num_dropped] = b
            num_dropped += 1
            _drop(b, fact.number, pool)
    for n in range(len(ids)):
        cols.index_of[first + ids[n]] = rank[slots[n] // s] * s + slots[n] % s
    was_readonly = np.zeros(len(blocks), dtype=np.bool_)
    for n in range(len(blocks)):
        if old_rank[blocks[n]] >= 0:
            was_readonly[n] = cols.readonly[base + old_rank[blocks[n]]]
    for n in range(fact.num_blocks):
        old_rank[cols.block_id[base + n]] = -1
    fact.gap = 0
    fact.num_blocks = len(blocks)
    fact.num_full = fact.num_dead_slots = fact.extent = fact.front = 0
    fact.hole = -1
    fact.virtual = 1
    for n in range(len(blocks)):
        rank[blocks[n]] = -1
        cols.block_id[segment + n] = blocks[n]
        cols.readonly[segment + n] = was_readonly[n]
        held = 0
        for p in range(n * s, (n + 1) * s):
            t = new_at[p]
            cols.token_at[segment * s + p] = t
            fact.num_dead_slots += t < -1
            if t >= 0:
                held += 1
                fact.extent = p + 1
        cols.block_live[segment + n] = held
        fact.num_full += held == s
    return DONE, num_dropped


@kernel
def _move_block(i, to, s, first, cols):
    """Move entry `i` of the arenas of blocks to `to`, with the tokens of a row.

    Both are of the row's segment; its tokens begin at `first` in `index_of`.
    """
    cols.block_id[to], cols.block_live[to] = cols.block_id[i], cols.block_live[i]
    cols.readonly[to] = cols.readonly[i]
    shift = (to - i) * s
    for at in range(i * s, (i + 1) * s):
        t = cols.token_at[at]
        cols.token_at[at + shift] = t
        if t >= 0:
            cols.index_of[first + t] += shift
        elif t < -1:
            cols.index_of[first - 2 - t] -= shift


@kernel
def drop_blocks(r, leaves, s, cols, pool, dropped):
    """Drop the blocks of row `r` where `leaves` [n] is set; the others close up.

    The longest run of blocks between dropped ones stays where it is in the segment, the others move
    to it. Refuses, without any change, to drop a block with a live token. Writes the dropped blocks
    to `dropped` in table order. Returns a code and their number.
    """
    fact = cols.facts[r]
    base, first = fact.first_block + fact.gap, fact.first_token
    for i in range(fact.num_blocks):
        if leaves[i] and cols.block_live[base + i]:
            return LOST, 0
    num_dropped = 0
    begin, stay, stop = 0, 0, 0  # the run that begins here; the longest so far
    for i in range(fact.num_blocks + 1):
        if i < fact.num_blocks and not leaves[i]:
            continue
        if i - begin > stop - stay:
            stay, stop = begin, i
        begin = i + 1
        if i == fact.num_blocks:
            break
        for at in range((base + i) * s, (base + i + 1) * s):
            if cols.token_at[at] < -1:
                cols.index_of[first - 2 - cols.token_at[at]] = -1
                fact.num_dead_slots -= 1
        dropped[num_dropped] = cols.block_id[base + i]
        num_dropped += 1
        _drop(cols.block_id[base + i], fact.number, pool)
    to = base + stop
    for i in range(base + stop, base + fact.num_blocks):
        if not leaves[i - base]:
            _move_block(i, to, s, first, cols)
            to += 1
    to = base + stay
    for i in range(base + stay - 1, base - 1, -1):
        if not leaves[i - base]:
            to -= 1
            _move_block(i, to, s, first, cols)
    fact.gap = to - fact.first_block
    fact.num_blocks -= num_dropped
    fact.hole = -1
    fact.extent = min(fact.extent, fact.num_blocks * s)
    while fact.extent > 0 and cols.token_at[to * s + fact.extent - 1] < 0:
        fact.extent -= 1
    fact.front = min(fact.front, fact.extent)
    return DONE, num_dropped


@kernel
def close_gap(r, s, cols):
    """Move the blocks of row `r` to the start of its segment."""
    fact = cols.facts[r]
    for i in range(fact.first_block + fact.gap, fact.first_block + fact.gap + fact.num_blocks):
        _move_block(i, i - fact.gap, s, fact.first_token, cols)
    fact.gap = 0


@kernel
def release(r, s, cols, pool):
    """Remove all tokens and drop all blocks of row `r`."""
    fact = cols.facts[r]
    for t in range(fact.first_token, fact.first_token + fact.num_tokens):
        q = cols.index_of[t]
        if q >= 0:
            slot = cols.block_id[fact.first_block + q // s] * s + q % s
            _remove_reader(slot, s, pool)
    base = fact.first_block + fact.gap
    for i in range(base, base + fact.num_blocks):
        _drop(cols.block_id[i], fact.number, pool)
