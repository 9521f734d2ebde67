"""Kernels over rows of requests: which are due, a batch's victims, a step's columns.

`vtoken.core.runtime.due`, `batch` and `draft` call them and document their arrays.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.compiled import kernel
from vtoken.wire import MAX_TOKENS

NEVER = MAX_TOKENS << 1  # of a limit or a floor: above every number of tokens


@kernel
def is_due(num_live, num_tokens, prefill_end, waits, limit, in_prefill, in_decode):
    """Whether a request is due; `waits`: it had no scores at its prompt's end."""
    if num_live <= limit:
        return False
    if num_tokens == prefill_end or waits:
        return True
    return in_prefill if num_tokens < prefill_end else in_decode


@kernel
def select_due(rows, gives, num_live, num_tokens, dues, out):
    """Write the due ones of `rows` [k] to `out` [k]; returns their number.

    `num_live`, `num_tokens`: by row. `gives`: those above their floor, not their limit, that have
    no relocation in flight. Resets `waits` where a prompt ends.
    """
    found = 0
    for j in range(len(rows)):
        r = rows[j]
        due = dues.facts[r]
        if num_tokens[r] == due.prefill_end:
            due.waits = False
        if gives and due.in_flight:
            continue
        if is_due(
            num_live[r], num_tokens[r], due.prefill_end, due.waits,
            due.floor if gives else due.limit, due.in_prefill, due.in_decode,
        ):  # fmt: skip
            out[found] = r
            found += 1
    return found


@kernel
def select_giving(num_rows, num_tokens, dues, out):
    """Write the rows of requests that give, now or later in their lives, to `out`; returns their
    number. `num_tokens`: by row.
    """
    found = 0
    for r in range(min(num_rows, len(dues.facts))):
        due = dues.facts[r]
        if due.floor < NEVER and (due.in_decode or num_tokens[r] <= due.prefill_end):
            out[found] = r
            found += 1
    return found


@kernel
def oldest(rows, num_victims, sinks, spans, cols, starts, out):
    """Each row's first num_victims[j] live ids from `sinks` on, or fewer if there are no more.

    Skips ids within the (start, end) pairs of `spans` [k]. Writes the ids to `out`, and their
    offsets to `starts` [k + 1].
    """
    put = 0
    starts[0] = 0
    for j in range(len(rows)):
        fact = cols.facts[rows[j]]
        left = num_victims[j]
        t = sinks
        span = spans.starts[j]
        while left > 0 and t < fact.num_tokens:
            while span < spans.starts[j + 1] and spans.values[span + 1] <= t:
                span += 2
            if span < spans.starts[j + 1] and spans.values[span] <= t:
                t = spans.values[span + 1]
                continue
            if cols.index_of[fact.first_token + t] >= 0:
                out[put] = t
                put += 1
                left -= 1
            t += 1
        starts[j + 1] = put


@kernel
def evictable(row, sinks, recent, scores, spans, cols, ids, values):
    """Write the live ids from `sinks` on, except the newest `recent` (at least one), to `ids`, and
    their `scores` [n], which are by token id, to `values`; returns their number. Newer tokens count
    as infinite. Ids within the (start, end) pairs `spans` [2 m] are ignored.
    """
    fact = cols.facts[row]
    found = 0
    span = 0
    for t in range(sinks, fact.num_tokens):
        while span < len(spans) and spans[span + 1] <= t:
            span += 2
        if span < len(spans) and spans[span] <= t:
            continue
        if cols.index_of[fact.first_token + t] >= 0:
            ids[found] = t
            values[found] = scores[t] if t < len(scores) else np.float32(np.inf)
            found += 1
    return max(0, found - max(recent, 1))


@kernel
def pick(wanted, rows, given, place, out, out_starts):
    """Copy the numbers of the rows `wanted` [k], distinct, to `out`; returns their count.

    Row rows[j] has the numbers of request j of `given`; a row not in `rows` has none. Writes
    offsets to `out_starts` [k + 1]. `place`: scratch by row, -1 before.
    """
    for j in range(len(rows)):
        if rows[j] >= 0:
            place[rows[j]] = j
    total = 0
    out_starts[0] = 0
    for i in range(len(wanted)):
        j = place[wanted[i]]
        if j >= 0:
            for at in range(given.starts[j], given.starts[j + 1]):
                out[total] = given.values[at]
                total += 1
        out_starts[i + 1] = total
    return total
