"""Victims of many requests at once, for policies that choose the oldest or the lowest scores.

A `TableBatch` returns what `oldest` and `lowest` of `vtoken.policies.base` return for each
request's view, without creating the views.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.arrays import Floats, Ints, Ragged
from vtoken.runtime import kernels
from vtoken.tables.token_tables import TokenTables

DIGITS = 2048  # of one pass of the radix selection: 11 bits of a score


class TableBatch:
    """Requests due for eviction: `rows` [k] of `tables`, each keeping `kept` [k] tokens.

    `scores` [k]: each request's signal by token id, if the policy reads one. `protected` [k]:
    (start, end) pairs of tokens that are never victims; `budget` [k] is what stays besides those.
    """

    def __init__(
        self,
        tables: TokenTables,
        rows: Ints,
        kept: Ints,
        scores: Sequence[Floats],
        protected: Ragged,
    ) -> None:
        self._tables = tables
        self._scores = scores
        self._protected = protected
        self.rows = rows
        self.num_victims: Ints = tables.columns.num_live[rows] - kept
        self.budget = kept
        if len(protected.values):
            self.budget = kept - tables.num_live_in(rows, protected)

    def oldest(self, sinks: int) -> Ragged:
        """Each request's `num_victims` oldest ids, except the first `sinks` positions."""
        columns = self._tables.columns
        starts = np.empty(len(self.rows) + 1, dtype=np.int64)
        out = np.empty(int(self.num_victims.sum()), dtype=np.int64)
        kernels.oldest(
            self.rows, self.num_victims, sinks, self._protected.starts, self._protected.values,
            columns.records, columns.index, starts, out,
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
        ids, keys = np.empty(longest, dtype=np.int64), np.empty(longest, dtype=np.uint32)
        count = np.empty(DIGITS, dtype=np.int64)
        for j, row in enumerate(self.rows.tolist()):
            starts[j + 1] = starts[j] + kernels.lowest(
                row, self.num_victims[j], sinks, recent[j], self._scores[j], self._protected.of(j),
                columns.records, columns.index, ids, keys, count, out[starts[j] :],
            )  # fmt: skip
        return Ragged(out[: starts[-1]], starts)
