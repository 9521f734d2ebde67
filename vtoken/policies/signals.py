"""Signals: one number a live token, higher = keep, taken from attention rows or from keys.

Knows numpy only: neither the probe that makes the rows nor the policies that read the numbers.

A *row* r[q, t] is the attention that query q gives to token t: the softmax over the live tokens
that q can see (ids up to its own), mean over all query heads, sum over the L probed layers. So a
row sums to L. Rows exist for every prompt query that is computed (what the prefix cache answers is
not) and for the decode query of every `probe_every_steps`-th step: these are the *probed* queries.

    kind               value of token t                                            read by
    attention_sum      sum of r[q, t] over the probed queries                      h2o
    attention_last     r[q, t] of the newest probed query                          tova
    attention_window   mean of r[q, t] over the newest W probed queries            snapkv, fastgen
    attention_hits     how many of the newest W probed queries have r[q, t] / L    scissorhands
                       at least 1 / n_q, n_q the number of live tokens q can see
    key_norm           -mean over KV heads of |k_t|, sum over layers               knorm
    key_difference     -mean over KV heads of cos(k_t, mean of k / |k| over the    keydiff
                       live tokens), sum over layers; k is the cached key, after RoPE

Of several layers only whole rows count: a hit is one of the layers' mean.

1. A query that came before t counts as r[q, t] = 0: in a mean it counts, a hit it is not.
2. Rows are of the moment: what a token that died later had received stays where it went.
3. A signal over several queries is not told before it rests on min(W, 32) of them (W = 32 for
   attention_sum), or on every query since the request's first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Floats, Ints

Rows = TypeVar("Rows")  # `Floats` here; a worker may keep its rows elsewhere
Kind = Literal[
    "attention_sum",
    "attention_last",
    "attention_window",
    "attention_hits",
    "key_norm",
    "key_difference",
]
WARM_QUERIES = 32


@dataclass(frozen=True, slots=True)
class Signal:
    """`window_queries`: W, for the kinds that have one; 0 for the others."""

    kind: Kind
    window_queries: int = 0

    def __post_init__(self) -> None:
        windowed = self.kind in ("attention_window", "attention_hits")
        if (self.window_queries > 0) != windowed:
            raise ValueError(f"{self.kind} with a window of {self.window_queries} queries")

    @property
    def of_keys(self) -> bool:
        return self.kind == "key_norm" or self.kind == "key_difference"

    @property
    def source(self) -> Literal["attention", "keys"]:
        return "keys" if self.of_keys else "attention"

    def num_rows(self, num_queries: int) -> int:
        """How many of a step's newest `num_queries` matter."""
        if self.kind == "attention_sum":
            return num_queries
        return min(num_queries, self.window_queries or 1)

    def __str__(self) -> str:
        return f"{self.kind}({self.window_queries})" if self.window_queries else self.kind


class Keeper(Generic[Rows]):
    """What the worker keeps of one request's attention; `make_keeper` picks the subclass.

    `num_tokens`: tokens of the request at the last `add`; `num_queries`: probed so far.
    """

    def __init__(self, signal: Signal, layers: tuple[int, ...]) -> None:
        self.signal = signal
        self.layers = layers
        self.num_tokens = 0
        self.num_queries = 0
        self._complete = True  # every query since the first token was probed

    def add(self, ids: Ints, rows: Rows, num_queries: int) -> None:
        """One step's `num_queries` newest tokens asked: `rows` [k, n] over the live `ids` [n].

        `ids` ascend and end with the tokens that asked. `rows` are those of the newest
        `signal.num_rows(num_queries)` queries, oldest first; for attention_sum, their sum [1, n].
        """
        num_tokens = int(ids[-1]) + 1
        self._complete &= self.num_tokens + num_queries == num_tokens
        self.num_tokens = num_tokens
        self.num_queries += num_queries
        self._add(ids, rows)

    def scores(self) -> Rows | None:
        """The signal by token id [num_tokens], 0 for dead tokens; None while it is too young."""
        needed = min(self.signal.window_queries or WARM_QUERIES, WARM_QUERIES)
        if self.num_queries == 0 or not (self._complete or self.num_queries >= needed):
            return None
        return self._scores()

    def _add(self, ids: Ints, rows: Rows) -> None:
        raise NotImplementedError

    def _scores(self) -> Rows:
        raise NotImplementedError


class SumKeeper(Keeper[Floats]):
    """One float a token."""

    def __init__(self, signal: Signal, layers: tuple[int, ...]) -> None:
        super().__init__(signal, layers)
        self._sums = np.zeros(0, dtype=np.float32)

    def _add(self, ids: Ints, rows: Floats) -> None:
        if len(self._sums) < self.num_tokens:
            grown = np.zeros(self.num_tokens + self.num_tokens // 2, dtype=np.float32)
            grown[: len(self._sums)] = self._sums
            self._sums = grown
        self._sums[ids] += rows[0]

    def _scores(self) -> Floats:
        return self._sums[: self.num_tokens].copy()


class LastKeeper(Keeper[Floats]):
    """The newest row as it came."""

    def _add(self, ids: Ints, rows: Floats) -> None:
        self._ids, self._row = ids, rows[-1]

    def scores(self) -> Floats | None:
        return self._scores() if self.num_queries else None

    def _scores(self) -> Floats:
        return by_id(self._ids, self._row, self.num_tokens)


class RingKeeper(Keeper[Floats]):
    """The newest W rows over the live tokens; the columns of dead tokens are dropped.

    `_data` [rows, capacity]: column j belongs to token `_ids[j]`. Capacity follows the live tokens,
    so a long request under a budget costs what its budget costs.
    """

    _num_rows: int
    _dtype: type[np.generic]

    def __init__(self, signal: Signal, layers: tuple[int, ...]) -> None:
        super().__init__(signal, layers)
        self._ids: Ints = np.empty(0, dtype=np.int64)
        self._data: npt.NDArray[Any] = np.zeros((self._num_rows, 0), dtype=self._dtype)
        self._next = 0  # the query slot 0 .. W - 1 that is written next

    def _align(self, ids: Ints) -> None:
        """Make column j that of `ids[j]`: drop the dead, add zeros for the new ones."""
        known = int(np.searchsorted(ids, self._ids[-1] + 1)) if len(self._ids) else 0
        num_ids, capacity = len(ids), self._data.shape[1]
        kept = slice(0, known)
        if known < len(self._ids):
            columns = np.searchsorted(self._ids, ids[kept])
            self._data[:, kept] = self._data[:, columns]
        if not num_ids <= capacity <= 4 * num_ids + 64:
            shape = (len(self._data), num_ids + num_ids // 4 + 16)
            moved = np.zeros(shape, dtype=self._dtype)
            moved[:, kept] = self._data[:, kept]
            self._data = moved
        self._data[:, known:num_ids] = 0
        self._ids = ids

    def _slots(self, num_rows: int) -> Ints:
        """The query slots [num_rows] that the newest rows take."""
        window = self.signal.window_queries
        slots = (self._next + np.arange(num_rows)) % window
        self._next = (self._next + num_rows) % window
        return slots


class WindowKeeper(RingKeeper):
    """W rows of floats: 4 * W bytes a live token."""

    def __init__(self, signal: Signal, layers: tuple[int, ...]) -> None:
        self._num_rows, self._dtype = signal.window_queries, np.float32
        super().__init__(signal, layers)

    def _add(self, ids: Ints, rows: Floats) -> None:
        self._align(ids)
        self._data[self._slots(len(rows)), : len(ids)] = rows

    def _scores(self) -> Floats:
        rows = min(self.num_queries, self.signal.window_queries)
        mean = self._data[:rows, : len(self._ids)].mean(axis=0)
        return by_id(self._ids, mean, self.num_tokens)


class HitsKeeper(RingKeeper):
    """W rows of bits, eight queries a byte: W / 8 bytes a live token."""

    def __init__(self, signal: Signal, layers: tuple[int, ...]) -> None:
        self._num_rows, self._dtype = -(-signal.window_queries // 8), np.uint8
        super().__init__(signal, layers)

    def _add(self, ids: Ints, rows: Floats) -> None:
        self._align(ids)
        num_rows, num_ids = rows.shape
        num_seen = np.arange(num_ids - num_rows + 1, num_ids + 1, dtype=np.float32)
        hits = rows * num_seen[:, None] >= len(self.layers)
        for slot, hit in zip(self._slots(num_rows).tolist(), hits, strict=True):
            byte, bit = self._data[slot // 8, :num_ids], np.uint8(1 << slot % 8)
            byte &= ~bit
            byte |= hit * bit

    def _scores(self) -> Floats:
        counts = np.bitwise_count(self._data[:, : len(self._ids)]).sum(axis=0)
        return by_id(self._ids, counts.astype(np.float32), self.num_tokens)


def by_id(ids: Ints, values: Floats, num_tokens: int) -> Floats:
    """`values` [n] of the tokens `ids` [n] as numbers by token id [num_tokens], 0 for others."""
    out = np.zeros(num_tokens, dtype=np.float32)
    out[ids] = values
    return out


_KEEPERS: dict[Kind, type[Keeper[Floats]]] = {
    "attention_sum": SumKeeper,
    "attention_last": LastKeeper,
    "attention_window": WindowKeeper,
    "attention_hits": HitsKeeper,
}


def make_keeper(signal: Signal, layers: tuple[int, ...]) -> Keeper[Floats]:
    """The keeper of an attention signal over the probed `layers`."""
    return _KEEPERS[signal.kind](signal, layers)
