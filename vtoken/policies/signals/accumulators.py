"""What a worker keeps of one request's attention: the rows of the queries that a signal rests on.

One accumulator serves every kind of attention signal. It keeps arrays of numpy; a subclass with
those of a device defines `_zeros`, `_take` and `_pooled`.

Column j of an accumulator's `data` belongs to the live token `ids[j]`; slots in the cache do not
matter. Memory follows the number of live tokens: 4 bytes a token for a signal over all queries, for
a window of W queries 4 W, or W where the kind keeps bools. Columns beyond the last live token are
zero, because earlier queries give a new token no attention.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Floats, Ints
from vtoken.policies.signals.kind import Array, AttentionKind
from vtoken.policies.signals.neighbours import pooled
from vtoken.policies.signals.signal import Signal

NO_IDS: Ints = np.empty(0, dtype=np.int64)


class Accumulator:
    """Accumulates the attention rows of one request.

    `num_tokens`: the request's tokens at the last `add`; `ids` [n]: the live ones among them.
    `num_queries`: queries probed so far. `data`: `num_rows` rows of at least n columns.
    """

    def __init__(self, signal: Signal) -> None:
        kind = signal.definition
        assert isinstance(kind, AttentionKind)
        self.signal = signal
        self.ids: Ints = NO_IDS
        self.num_tokens = 0
        self.num_queries = 0
        self._kind = kind
        self._complete = True  # every query since the first token was probed
        self._sums = kind.queries == "all"
        self.num_rows = 1 if self._sums else signal.window_queries or 1
        self._dtype = "float32" if self._sums else kind.keeps
        self.data = self._zeros(0)
        self._next = 0  # the row of the window that is written next

    def _zeros(self, num_columns: int) -> Array:
        return np.zeros((self.num_rows, num_columns), dtype=self._dtype)

    def _take(self, data: Array, columns: Ints) -> Array:
        """The `columns` [k] of `data` [rows, n], copied."""
        return data[:, columns]

    def _pooled(self, values: Array) -> Array:
        """`values` [n], each aggregated with its neighbours."""
        return pooled(self.signal, values)

    def add(self, ids: Ints, rows: Array, num_queries: int) -> None:
        """Add one step's `rows` [k, n] over the live `ids` [n].

        The step's queries are its `num_queries` newest tokens. `ids` ascend and end with them.
        `rows` are those of the newest `signal.num_rows(num_queries)` queries, oldest first; their
        sum [1, n] if `signal.sums_rows`.
        """
        columns, given = self._align(ids), self._kind.of_query(rows)
        self._count(int(ids[-1]) + 1, num_queries)
        self.ids = ids
        if self._sums:
            columns[0] += self._kind.over_queries(given)
        else:
            self._write(columns, given)

    @property
    def is_warm(self) -> bool:
        """Whether the signal rests on enough queries."""
        enough = self._complete or self.num_queries >= self.signal.warm_queries
        return self.num_queries > 0 and enough

    def scores(self) -> Array | None:
        """The signal of the tokens `ids` [n] before redundancy is mixed in; None while it rests on
        too few queries. A later `add` may overwrite the array.
        """
        if not self.is_warm:
            return None
        columns = self.data[:, : len(self.ids)]
        return self._pooled(columns[0] if self._sums else self._read(columns))

    def _count(self, num_tokens: int, num_queries: int) -> None:
        """Take a step's queries, those of the newest of `num_tokens` tokens."""
        self._complete &= self.num_tokens + num_queries == num_tokens
        self.num_tokens = num_tokens
        self.num_queries += num_queries

    def _fits(self, num_ids: int, columns: int) -> bool:
        """Whether `columns` are enough for `num_ids` tokens, and not far too many."""
        return num_ids <= columns <= 4 * num_ids + 64

    def _room(self, num_ids: int) -> int:
        """Columns for `num_ids` tokens and some more."""
        return num_ids + num_ids // 4 + 16

    def _align(self, ids: Ints) -> Array:
        """Make column j that of `ids[j]`; return the columns in use [rows, n]."""
        before, num_ids = self.ids, len(ids)
        known = int(np.searchsorted(ids, before[-1] + 1)) if len(before) else 0
        kept = self.data[:, : len(before)]
        tokens_died = known < len(before)
        if tokens_died:
            kept = self._take(kept, np.searchsorted(before, ids[:known]))
        if not self._fits(num_ids, self.data.shape[1]):
            self.data = self._zeros(self._room(num_ids))
            self.data[:, :known] = kept
        elif tokens_died:
            self.data[:, :known] = kept
            self.data[:, known : len(before)] = 0
        return self.data[:, :num_ids]

    def _write(self, columns: Array, given: Array) -> None:
        """Overwrite the window's k oldest queries with `given` [k, n]."""
        first, num_rows = self._next, len(given)
        fits = min(num_rows, self.num_rows - first)
        columns[first : first + fits] = given[:fits]
        if fits < num_rows:
            columns[: num_rows - fits] = given[fits:]
        self._next = (first + num_rows) % self.num_rows

    def _read(self, columns: Array) -> Array:
        """The numbers [n] of the window's queries in `columns` [rows, n]."""
        return self._kind.over_queries(columns[: min(self.num_queries, self.num_rows)])


def by_id(ids: Ints, values: Floats, num_tokens: int) -> Floats:
    """`values` [n] of the tokens `ids` [n], indexed by token id [num_tokens], 0 for others."""
    out = np.zeros(num_tokens, dtype=np.float32)
    out[ids] = values
    return out
