"""What a worker keeps of one request's attention: the rows of the queries that a signal rests on.

One accumulator serves every kind of attention signal. It keeps arrays of numpy; a subclass with
those of a device defines `_zeros`, `_take` and `_pooled`.

Column j of an accumulator's `data` belongs to the live token `ids[j]`; slots in the cache do not
matter. Memory follows the number of live tokens: 4 bytes a token for a signal over all queries, for
a window of W queries 4 W, or W where the kind keeps bools. Columns beyond the last live token, of
which there is one at least, are zero, because earlier queries give a new token no attention.

A token that was dead at an earlier `add` may be live again. In a window it starts at zero: what
queries gave it before does not count. A sum over all queries continues: it is kept when its token
dies, whether a copy of the token exists or not, so the workers of all ranks and stages agree. Once
a token has died, that takes 4 bytes for every token of the request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Floats, Ints
from vtoken.policies.signals.kind import Array, AttentionKind
from vtoken.policies.signals.neighbours import pooled
from vtoken.policies.signals.signal import Signal

NO_IDS: Ints = np.empty(0, dtype=np.int64)


class Change(NamedTuple):
    """Tokens died or came back between two calls of `add`.

    `columns` [m]: where the m tokens that existed before and live now were; one that came back was
    in the column after the last. `back`: which of the m came back, `back_ids`: their ids. `dead`:
    the columns of tokens that died, `dead_ids`: their ids.
    """

    columns: Ints
    back: Ints
    back_ids: Ints
    dead: Ints
    dead_ids: Ints


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
        self._of_dead = self._zeros(0)  # by token id: the sums of tokens when they died
        self._next = 0  # the row of the window that is written next

    def _zeros(self, num_columns: int) -> Array:
        return np.zeros((self.num_rows, num_columns), dtype=self._dtype)

    def _take(self, data: Array, columns: Ints) -> Array:
        """The `columns` [k] of `data` [rows, n], copied."""
        return data[:, columns]

    def _put(self, data: Array, columns: Ints, values: Array) -> None:
        """Overwrite the `columns` [k] of `data` [rows, n] with `values` [rows, k]."""
        data[:, columns] = values

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
        return num_ids < columns <= 4 * num_ids + 64

    def _room(self, num_ids: int) -> int:
        """Columns for `num_ids` tokens and some more."""
        return num_ids + num_ids // 4 + 16

    def _align(self, ids: Ints) -> Array:
        """Make column j that of `ids[j]`; return the columns in use [rows, n]."""
        num_before, num_ids = len(self.ids), len(ids)
        change = self._change_to(ids)
        known, kept = num_before, self.data[:, :num_before]
        if change is not None:
            known, kept = len(change.columns), self._take(self.data, change.columns)
            if self._sums:
                self._reserve_sums()
                self._put(self._of_dead, change.dead_ids, self._take(self.data, change.dead))
                self._put(kept, change.back, self._take(self._of_dead, change.back_ids))
        if not self._fits(num_ids, self.data.shape[1]):
            self.data = self._zeros(self._room(num_ids))
            self.data[:, :known] = kept
        elif change is not None:
            self.data[:, :known] = kept
            self.data[:, known:num_before] = 0
        return self.data[:, :num_ids]

    def _change_to(self, ids: Ints) -> Change | None:
        """What is another column for the live `ids` [n] than for those of the last `add`; None if
        all those live, and no other that existed then.
        """
        before = self.ids
        known = ids[: np.searchsorted(ids, self.num_tokens)]
        if np.array_equal(known, before):
            return None
        columns = np.searchsorted(before, known)
        back = np.flatnonzero(before.take(columns, mode="clip") != known)
        columns[back] = len(before)  # zeros
        is_lost = np.ones(len(before) + 1, dtype=np.bool_)
        is_lost[columns] = False
        dead = np.flatnonzero(is_lost[:-1])
        return Change(columns, back, known[back], dead, before[dead])

    def _reserve_sums(self) -> None:
        """Make room for the sums of all tokens up to the last `add`."""
        before = self._of_dead
        if before.shape[1] < self.num_tokens:
            self._of_dead = self._zeros(self._room(self.num_tokens))
            self._of_dead[:, : before.shape[1]] = before

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
    """`values` [n] of the tokens `ids` [n], indexed by token id [num_tokens]; infinite for others,
    which are dead, or are live again since the newest `add` and have no number yet.
    """
    out = np.full(num_tokens, np.inf, dtype=np.float32)
    out[ids] = values
    return out
