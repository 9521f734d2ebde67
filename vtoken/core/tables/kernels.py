"""The kernels that change the token tables: loops over `vtoken.core.tables.columns`.

Names: S block size; p place, a physical index; i logical block; b block; slot = b * S + p % S.
State of one token, for id t and place p of one row, with q = gap * S + p:

    index[t] = q       t is live at p                <=>  token_at[p] = t
    index[t] = -2 - q  t is dead, its K/V still at p <=>  token_at[p] = -2 - t
    index[t] = -1      t is dead and has no slot          token_at[p] = -1: nothing written

q counts from the start of the row's segment, where `gap` blocks have left at the front. So a block
that leaves near the front moves the few blocks before it, not the many behind it:

    segment        0     1     2     3     4     5     6        gap = 2, num_blocks = 4,
                |  -  |  -  | a b | . c | d e | f . |     |     capacity = 7
    place p                   0 1   2 3   4 5   6 7             S = 2; c: p = 3, q = 7
    block 3 loses c and leaves: block 2 moves to 3, and gap = 3
                |  -  |  -  |  -  | a b | d e | f . |     |     d: p = 4 -> 2, q = 8 as before

Equations that hold before and after every kernel, for each row:

    num_live = |{t : index[t] >= 0}|             extent = 1 + max {p : token_at[p] >= 0}, 0 if none
    block_live[i] = |{p in block i : token_at[p] >= 0}|     num_full = |{i : block_live[i] = S}|
    num_dead_slots = |{p : token_at[p] < -1}|               every place below front is live
    naive_live[k] = |{t : t // S = k, index[t] >= 0}|     num_naive = |{k : naive_live[k] > 0}|

and for the pool: readers[slot] = live tokens in the slot, over all rows; live[b] = slots of b with
a reader; holders[b] = rows that hold b; counts = [held blocks, slots with a reader].

A kernel that refuses a request returns a code, writes the numbers of the error message to
`detail` [3] and leaves that request unchanged.
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

MAX_HOLDERS = 65_535  # `holders` and `readers` are uint16

# Indices of `counted` in `append`.
WRITTEN, RECYCLED = 0, 1


# ---------------------------------------------------------------- the pool


@kernel
def _hold(b, number, holders, usage, owner, counts):
    if holders[b] == 0:
        counts[0] += 1
        usage[b] = USED
    else:
        usage[b] = USED | SHARED
    holders[b] += 1
    owner[b] = number


@kernel
def _drop(b, number, holders, usage, owner, owner_stale, counts):
    holders[b] -= 1
    if holders[b] == 0:
        counts[0] -= 1
        usage[b] = 0
        owner[b] = 0
        return
    if holders[b] == 1:
        usage[b] = USED
    if owner[b] == number:
        owner_stale[b] = True


@kernel
def _add_reader(slot, s, readers, live, counts):
    if readers[slot] == 0:
        live[slot // s] += 1
        counts[1] += 1
    readers[slot] += 1


@kernel
def _remove_reader(slot, s, readers, live, counts):
    readers[slot] -= 1
    if readers[slot] == 0:
        live[slot // s] -= 1
        counts[1] -= 1


# ---------------------------------------------------------------- growth


@kernel
def _append_start(fact, s, readonly):
    """The first place behind the last live token and behind all read-only blocks."""
    start = fact.extent
    base = fact.first_block + fact.gap
    for i in range(start // s, fact.num_blocks):
        if readonly[base + i]:
            start = (i + 1) * s
    return start


@kernel
def append(
    first, rows, totals, added_starts, added, s,
    facts, index, naive_live, token_at, block_id, block_live, readonly,
    readers, live, holders, usage, owner, counts,
    slots, starts, written, counted, detail,
):  # fmt: skip
    """Grow requests `rows` [k], from the `first`-th on, to `totals` [k] tokens.

    Each gains the blocks added[added_starts[j]:added_starts[j + 1]]. A single new
    token goes into the row's `hole`, if there is one. Writes the new tokens' slots to `slots`, with
    offsets in `starts` [k + 1]; to `written` the counted[WRITTEN] blocks that requests which have
    evicted write to; and counted[RECYCLED], the number of holes filled. Returns a code and the
    index of the request at which it stopped.
    """
    for j in range(first, len(rows)):
        r = rows[j]
        fact = facts[r]
        num_new = totals[j] - fact.num_tokens
        num_added = added_starts[j + 1] - added_starts[j]
        if num_new < 0:
            return SHRANK, j
        if (
            totals[j] > fact.token_capacity
            or fact.gap + fact.num_blocks + num_added > fact.block_capacity
            or starts[j] + num_new > len(slots)
        ):
            return NO_CAPACITY, j
        for at in range(added_starts[j], added_starts[j + 1]):
            if added[at] < 0 or added[at] >= len(holders):
                detail[0] = added[at]
                return NO_BLOCK, j
            if holders[added[at]] == MAX_HOLDERS:
                detail[0] = added[at]
                return CROWDED, j
        base, shift = fact.first_block + fact.gap, fact.gap * s
        place = fact.extent
        if fact.virtual:
            if num_new == 1 and fact.hole >= 0:
                place = fact.hole
            else:
                place = _append_start(fact, s, readonly)
        if place + num_new > (fact.num_blocks + num_added) * s:
            detail[0], detail[1], detail[2] = num_new, place, fact.num_blocks + num_added
            return NO_PLACE, j
        for p in range(place, place + num_new):
            if p < fact.num_blocks * s and token_at[base * s + p] >= 0:
                detail[0] = p
                return OCCUPIED, j
        for at in range(added_starts[j], added_starts[j + 1]):
            i = base + fact.num_blocks
            block_id[i] = added[at]
            block_live[i] = 0
            readonly[i] = False
            for p in range(i * s, (i + 1) * s):
                token_at[p] = -1
            _hold(added[at], fact.number, holders, usage, owner, counts)
            fact.num_blocks += 1
        if fact.virtual and num_new == 1 and place == fact.hole:
            counted[RECYCLED] += 1
            fact.num_recycled += 1
            fact.hole = -1
        put = starts[j]
        for p in range(place, place + num_new):
            at = base * s + p
            i = base + p // s
            b = block_id[i]
            t = fact.num_tokens
            if token_at[at] < -1:
                index[fact.first_token - 2 - token_at[at]] = -1
                fact.num_dead_slots -= 1
            token_at[at] = t
            index[fact.first_token + t] = shift + p
            block_live[i] += 1
            fact.num_full += block_live[i] == s
            k = (fact.first_token + t) // s
            fact.num_naive += naive_live[k] == 0
            naive_live[k] += 1
            slot = b * s + p % s
            _add_reader(slot, s, readers, live, counts)
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
def choose_places(s, recycling, num_rows, facts, token_at, readonly, next_extent, start_of):
    """Choose where each request writes next: a hole in `facts.hole`, or `start_of`.

    By row, `start_of` is the first place of appended tokens and `next_extent` the number of places
    that a single new token requires. Returns whether a request with holes holds more blocks than
    its live tokens and the next one need.
    """
    spare = False
    for r in range(num_rows):
        fact = facts[r]
        fact.hole = -1
        start = fact.extent
        if fact.virtual:
            start = _append_start(fact, s, readonly)
            if fact.extent != fact.num_live:
                spare = spare or fact.num_blocks > fact.num_live // s + 1
                if recycling:
                    base = fact.first_block + fact.gap
                    p = fact.front
                    while p < fact.extent and token_at[base * s + p] >= 0:
                        p += 1
                    fact.front = p
                    while p < fact.extent:
                        if readonly[base + p // s]:
                            p = (p // s + 1) * s
                        elif token_at[base * s + p] >= 0:
                            p += 1
                        else:
                            fact.hole = p
                            break
        start_of[r] = start
        next_extent[r] = fact.extent if fact.hole >= 0 else start + 1
    return spare


# ---------------------------------------------------------------- eviction


@kernel
def num_live_in(rows, span_starts, spans, facts, index, out):
    """Count the live tokens within each row's spans (start, end pairs) into `out` [k]."""
    for j in range(len(rows)):
        fact = facts[rows[j]]
        out[j] = 0
        for span in range(span_starts[j], span_starts[j + 1], 2):
            for t in range(spans[span], min(spans[span + 1], fact.num_tokens)):
                out[j] += index[fact.first_token + t] >= 0


@kernel
def evict(
    rows, starts, ids, num_due, span_starts, spans, s,
    facts, index, naive_live, token_at, block_id, block_live,
    readers, live, counts,
    codes, num_emptied,
):  # fmt: skip
    """Evict tokens ids[starts[j]:starts[j + 1]], ascending, of each request rows[j].

    `num_due` [k]: the required number of victims, the newest token excluded; -1: any. No victim may
    be inside the protected (start, end) pairs spans[span_starts[j] : span_starts[j + 1]]. Writes
    `codes` [k], the reason a request was refused, and `num_emptied` [k], its blocks that lost their
    last live token.
    """
    for j in range(len(rows)):
        fact = facts[rows[j]]
        codes[j] = DONE
        num_emptied[j] = 0
        low, high = starts[j], starts[j + 1]
        last = -1
        span = span_starts[j]
        for at in range(low, high):
            t = ids[at]
            if t <= last or t >= fact.num_tokens:
                codes[j] = UNKNOWN
                break
            while span < span_starts[j + 1] and spans[span + 1] <= t:
                span += 2
            if span < span_starts[j + 1] and spans[span] <= t:
                codes[j] = PROTECTED
                break
            if index[fact.first_token + t] < 0:
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
            t = ids[at]
            q = index[fact.first_token + t]
            i = fact.first_block + q // s
            index[fact.first_token + t] = -2 - q
            token_at[fact.first_block * s + q] = -2 - t
            fact.num_full -= block_live[i] == s
            block_live[i] -= 1
            num_emptied[j] += block_live[i] == 0
            k = (fact.first_token + t) // s
            naive_live[k] -= 1
            fact.num_naive -= naive_live[k] == 0
            _remove_reader(block_id[i] * s + q % s, s, readers, live, counts)
            fact.front = min(fact.front, q - fact.gap * s)
        fact.num_dead_slots += high - low
        fact.num_live -= high - low
        base = (fact.first_block + fact.gap) * s
        while fact.extent > 0 and token_at[base + fact.extent - 1] < 0:
            fact.extent -= 1


# ---------------------------------------------------------------- relocation


@kernel
def relocate(
    r, ids, slots, blocks, s,
    facts, index, token_at, block_id, block_live, readonly,
    readers, live, holders, usage, owner, owner_stale, counts,
    rank, old_rank, dropped, detail,
):  # fmt: skip
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
    fact = facts[r]
    segment, first = fact.first_block, fact.first_token
    base = segment + fact.gap
    code = DONE
    for n in range(fact.num_blocks):
        old_rank[block_id[base + n]] = n
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
            if rank[block_id[base + n]] < 0:
                num_left += block_live[base + n]
    num_marked = 0
    if code == DONE:
        for n in range(len(ids)):
            t = ids[n]
            if t < 0 or t >= fact.num_tokens or index[first + t] < 0:
                code = DEAD
                break
            b = slots[n] // s
            if slots[n] < 0 or b >= len(rank) or rank[b] < 0:
                code, detail[0] = OUTSIDE, b
                break
            o = slots[n] % s
            to = rank[b] * s + o
            if new_at[to] >= 0 or (
                old_rank[b] >= 0 and token_at[(base + old_rank[b]) * s + o] >= 0
            ):
                code = TAKEN
                break
            new_at[to] = t
            q = index[first + t]
            num_left -= rank[block_id[segment + q // s]] < 0
            index[first + t] = -2 - q  # marks the token as moved; undone below
            num_marked += 1
        for n in range(num_marked):
            index[first + ids[n]] = -2 - index[first + ids[n]]
    if code == DONE and num_left:
        code, detail[0] = LOST, fact.num_live - num_left
    if code != DONE:
        for n in range(num_ranked):
            rank[blocks[n]] = -1
        for n in range(fact.num_blocks):
            old_rank[block_id[base + n]] = -1
        return code, 0
    for n in range(len(blocks)):
        if old_rank[blocks[n]] < 0:
            _hold(blocks[n], fact.number, holders, usage, owner, counts)
    for n in range(len(ids)):
        q = index[first + ids[n]]
        _remove_reader(block_id[segment + q // s] * s + q % s, s, readers, live, counts)
        token_at[segment * s + q] = -1
        _add_reader(slots[n], s, readers, live, counts)
    num_dropped = 0
    for n in range(fact.num_blocks):
        b = block_id[base + n]
        to = rank[b]
        for o in range(s):
            t = token_at[(base + n) * s + o]
            if t == -1:
                continue
            if to < 0:
                index[first - 2 - t] = -1  # dead: a dropped block holds no live token
            elif t >= 0:
                new_at[to * s + o] = t
                index[first + t] = to * s + o
            elif new_at[to * s + o] >= 0:
                index[first - 2 - t] = -1  # a moved token overwrites its slot
            else:
                new_at[to * s + o] = t
                index[first - 2 - t] = -2 - (to * s + o)
        if to < 0:
            dropped[num_dropped] = b
            num_dropped += 1
            _drop(b, fact.number, holders, usage, owner, owner_stale, counts)
    for n in range(len(ids)):
        index[first + ids[n]] = rank[slots[n] // s] * s + slots[n] % s
    was_readonly = np.zeros(len(blocks), dtype=np.bool_)
    for n in range(len(blocks)):
        if old_rank[blocks[n]] >= 0:
            was_readonly[n] = readonly[base + old_rank[blocks[n]]]
    for n in range(fact.num_blocks):
        old_rank[block_id[base + n]] = -1
    fact.gap = 0
    fact.num_blocks = len(blocks)
    fact.num_full = fact.num_dead_slots = fact.extent = fact.front = 0
    fact.hole = -1
    fact.virtual = 1
    for n in range(len(blocks)):
        rank[blocks[n]] = -1
        block_id[segment + n] = blocks[n]
        readonly[segment + n] = was_readonly[n]
        held = 0
        for p in range(n * s, (n + 1) * s):
            t = new_at[p]
            token_at[segment * s + p] = t
            fact.num_dead_slots += t < -1
            if t >= 0:
                held += 1
                fact.extent = p + 1
        block_live[segment + n] = held
        fact.num_full += held == s
    return DONE, num_dropped


@kernel
def _move_block(i, to, s, first, index, token_at, block_id, block_live, readonly):
    """Move entry `i` of the arenas of blocks to `to`, with the tokens of a row.

    Both are of the row's segment; its tokens begin at `first` in `index`.
    """
    block_id[to], block_live[to], readonly[to] = block_id[i], block_live[i], readonly[i]
    shift = (to - i) * s
    for at in range(i * s, (i + 1) * s):
        t = token_at[at]
        token_at[at + shift] = t
        if t >= 0:
            index[first + t] += shift
        elif t < -1:
            index[first - 2 - t] -= shift


@kernel
def drop_blocks(
    r, leaves, s,
    facts, index, token_at, block_id, block_live, readonly,
    holders, usage, owner, owner_stale, counts, dropped,
):  # fmt: skip
    """Drop the blocks of row `r` where `leaves` [n] is set; the others close up.

    The longest run of blocks between dropped ones stays where it is in the segment, the others move
    to it. Refuses, without any change, to drop a block with a live token. Writes the dropped blocks
    to `dropped` in table order. Returns a code and their number.
    """
    fact = facts[r]
    base, first = fact.first_block + fact.gap, fact.first_token
    for i in range(fact.num_blocks):
        if leaves[i] and block_live[base + i]:
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
            if token_at[at] < -1:
                index[first - 2 - token_at[at]] = -1
                fact.num_dead_slots -= 1
        dropped[num_dropped] = block_id[base + i]
        num_dropped += 1
        _drop(block_id[base + i], fact.number, holders, usage, owner, owner_stale, counts)
    to = base + stop
    for i in range(base + stop, base + fact.num_blocks):
        if not leaves[i - base]:
            _move_block(i, to, s, first, index, token_at, block_id, block_live, readonly)
            to += 1
    to = base + stay
    for i in range(base + stay - 1, base - 1, -1):
        if not leaves[i - base]:
            to -= 1
            _move_block(i, to, s, first, index, token_at, block_id, block_live, readonly)
    fact.gap = to - fact.first_block
    fact.num_blocks -= num_dropped
    fact.hole = -1
    fact.extent = min(fact.extent, fact.num_blocks * s)
    while fact.extent > 0 and token_at[to * s + fact.extent - 1] < 0:
        fact.extent -= 1
    fact.front = min(fact.front, fact.extent)
    return DONE, num_dropped


@kernel
def close_gap(r, s, facts, index, token_at, block_id, block_live, readonly):
    """Move the blocks of row `r` to the start of its segment."""
    fact = facts[r]
    for i in range(fact.first_block + fact.gap, fact.first_block + fact.gap + fact.num_blocks):
        _move_block(
            i, i - fact.gap, s, fact.first_token, index, token_at, block_id, block_live, readonly
        )
    fact.gap = 0


@kernel
def release(
    r, s, facts, index, block_id, readers, live, holders, usage, owner, owner_stale, counts
):  # fmt: skip
    """Remove all tokens and drop all blocks of row `r`."""
    fact = facts[r]
    for t in range(fact.first_token, fact.first_token + fact.num_tokens):
        q = index[t]
        if q >= 0:
            slot = block_id[fact.first_block + q // s] * s + q % s
            _remove_reader(slot, s, readers, live, counts)
    base = fact.first_block + fact.gap
    for i in range(base, base + fact.num_blocks):
        _drop(block_id[i], fact.number, holders, usage, owner, owner_stale, counts)
