"""The requests that are due at once, for a policy to choose their victims.

A `TableBatch` names the oldest tokens, or those with the lowest scores, from columns. It creates
views only for a policy that looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vtoken.base.arrays import Floats, Ints, Ragged
from vtoken.base.compiled import kernel
from vtoken.core.tables.columns import TableArrays
from vtoken.core.tables.token_tables import TokenTables
from vtoken.policies.kernels import DIGITS, lowest_scores
from vtoken.policies.view import View


class TableBatch:
    """Requests due for eviction: `rows` [k] of `tables`, each keeping `kept` [k] tokens.

    `scores` [k]: each request's signal by token id, if the policy reads one. `protected` [k]:
    (start, end) pairs of tokens that are never victims; `budget` [k] is what stays besides those.
    `view(i)`: the view of request i.
    """

    def __init__(
        self,
        tables: TokenTables,
        rows: Ints,
        kept: Ints,
        scores: Sequence[Floats],
        protected: Ragged,
        view: Callable[[int], View],
    ) -> None:
        self._tables = tables
        self._scores = scores
        self._protected = protected
        self._view = view
        self.rows = rows
        self.num_victims: Ints = tables.columns.num_live[rows] - kept
        self.budget = kept
        if len(protected.values):
            self.budget = kept - tables.num_live_in(rows, protected)

    def views(self) -> Iterator[View]:
        return map(self._view, range(len(self.rows)))

    def oldest(self, sinks: int) -> Ragged:
        """Each request's `num_victims` oldest ids, except the first `sinks` positions."""
        starts = np.empty(len(self.rows) + 1, dtype=np.int64)
        out = np.empty(int(self.num_victims.sum()), dtype=np.int64)
        _oldest(
            self.rows, self.num_victims, sinks, self._protected, self._tables.columns.arrays,
            starts, out,
        )  # fmt: skip
        return Ragged(out[: starts[-1]], starts)

    def lowest(self, sinks: int, recent: int | Ints) -> Ragged:
        """Each request's `num_victims` ids with the lowest scores, except the first `sinks`
        positions and the `recent` newest live tokens (one number, or one per request [k]).
        """
        columns = self._tables.columns
        recent = np.broadcast_to(recent, len(self.rows))
        starts = np.zeros(len(self.rows) + 1, dtype=np.int64)
        out = np.empty(int(self.num_victims.sum()), dtype=np.int64)
        longest = int(columns.num_live[self.rows].max(initial=0))
        ids, values = np.empty(longest, dtype=np.int64), np.empty(longest, dtype=np.float32)
        keys, count = np.empty(longest, dtype=np.uint32), np.empty(DIGITS, dtype=np.int64)
        for j, row in enumerate(self.rows.tolist()):
            found = _evictable(
                row, sinks, recent[j], self._scores[j], self._protected.of(j),
                columns.arrays, ids, values,
            )  # fmt: skip
            starts[j + 1] = starts[j] + lowest_scores(
                ids[:found], values[:found], self.num_victims[j], keys, count, out[starts[j] :]
            )
        return Ragged(out[: starts[-1]], starts)


# ---------------------------------------------------------------- kernels


@kernel
def _oldest(
    rows: Ints,
    num_victims: Ints,
    sinks: int,
    spans: Ragged,
    cols: TableArrays,
    starts: Ints,
    out: Ints,
) -> None:
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
def _evictable(
    row: int,
    sinks: int,
    recent: int,
    scores: Floats,
    spans: Ints,
    cols: TableArrays,
    ids: Ints,
    values: Floats,
) -> int:
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
