"""Signals: one number a live token, higher = keep, computed from attention rows or from keys.

This module is the definition and the numpy implementation. Probes produce the rows, policies read
the numbers.

A signal is computed in these steps, in this order. The first four are each a mean or a maximum:

    heads       a[l, q, t] over the probed query heads h of layer l, of the softmax a[l, h, q, t]
                over the live tokens that query q can see (ids up to its own)
    layers      the row r[q, t] over the probed layers of a[l, q, t]. Of means alone it sums to 1
    queries     by `kind`, below: one number for every live token t
    neighbours  over the 2 `pool_radius` + 1 live tokens around t, in the order of ids. The newest
                max(W, 1) tokens are excluded in both directions, since the queries of a window
                attend to each other. In a mean, a neighbour that does not exist counts 0
    redundancy  `mix_lambda` * the value so far - (1 - `mix_lambda`) * the token's redundancy among
                all currently live keys, a mean over probed heads and layers; see `redundancy`. Not
                for signals of keys; none where `mix_lambda` is 1

Rows exist for every computed prompt query (not for prefix-cache hits) and for the decode query of
every `probe.every_steps`-th step: these are the *probed* queries.

    kind               value of token t before its neighbours                      read by
    attention_sum      sum of r[q, t] over the probed queries                      h2o
    attention_last     r[q, t] of the newest probed query                          tova
    attention_window   mean of r[q, t] over the newest W probed queries            snapkv, fastgen,
                                                                                   r_kv
    attention_max      maximum of r[q, t] over the newest W probed queries         snapkv
    attention_hits     how many of the newest W probed queries have r[q, t] of     scissorhands
                       at least 1 / n_q, n_q the number of live tokens q can see
    key_norm           -|k_t| over heads and layers                                knorm
    key_difference     -cos(k_t, mean of k / |k| over the live tokens) over heads  keydiff
                       and layers; k is the cached key, after RoPE

In signals of keys, and in redundancy, a query head stands for the key of its KV head.

1. A query before t has r[q, t] = 0: it counts in a mean and is not a hit.
2. Rows are not recomputed: attention that went to tokens which died later is not redistributed, and
   neighbours are those that were live at the newest probed query.
3. A signal over several queries is not reported before min(W, 32) of them were probed (W = 32 for
   attention_sum), or every query since the request's first token.
4. Equal signals have equal numbers: layers and heads are part of a signal. A policy leaves them
   empty, and `vtoken.runtime.scoring` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from vtoken.arrays import Floats, Ints

Rows = TypeVar("Rows")  # `Floats` here; tensors in the CUDA worker
Kind = Literal[
    "attention_sum",
    "attention_last",
    "attention_window",
    "attention_max",
    "attention_hits",
    "key_norm",
    "key_difference",
]
Aggregate = Literal["mean", "max"]
WARM_QUERIES = 32
SIMILAR = 0.5  # keys whose cosine is greater are similar
NO_IDS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Signal:
    """The definition of one signal; raises ValueError if the parts are inconsistent.

    `window_queries`: W for the kinds that have a window, 0 for the others. `layers`: the probed
    layers. `heads`: query heads of the complete model, over all ranks, the same in each layer; ():
    all.
    """

    kind: Kind
    window_queries: int = 0
    over_heads: Aggregate = "mean"
    over_layers: Aggregate = "mean"
    pool: Aggregate = "mean"
    pool_radius: int = 0
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    mix_lambda: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(get_args(Kind))}")
        windowed = self.kind in ("attention_window", "attention_max", "attention_hits")
        if (self.window_queries > 0) != windowed:
            raise ValueError(f"{self.kind} with a window of {self.window_queries} queries")
        for name in ("over_heads", "over_layers", "pool"):
            if getattr(self, name) not in get_args(Aggregate):
                raise ValueError(f"{name} = {getattr(self, name)!r} is neither mean nor max")
        if self.pool_radius < 0:
            raise ValueError(f"pool_radius = {self.pool_radius} is negative")
        if not 0 <= self.mix_lambda <= 1:
            raise ValueError(f"mix_lambda = {self.mix_lambda} is not in 0 .. 1")
        if self.is_mixed and self.of_keys:
            raise ValueError(f"{self.kind} is a signal of keys, which redundancy is not mixed into")
        if self.kind == "attention_sum" and "max" in (self.over_heads, self.over_layers):
            # Workers sum the queries of a chunk in every layer and keep no single row.
            raise ValueError("attention_sum takes the mean over heads and layers, not the maximum")

    @property
    def of_keys(self) -> bool:
        return self.kind == "key_norm" or self.kind == "key_difference"

    @property
    def source(self) -> Literal["attention", "keys"]:
        return "keys" if self.of_keys else "attention"

    @property
    def is_mixed(self) -> bool:
        """Whether redundancy is mixed in."""
        return self.mix_lambda < 1

    @property
    def parts(self) -> int:
        """How many rows are kept separately until all layers have run.

        One if heads and layers have the same aggregate, since then their order does not matter;
        else one a layer.
        """
        return 1 if self.over_heads == self.over_layers else len(self.layers)

    @property
    def is_linear(self) -> bool:
        """Whether the numbers over two disjoint sets of heads add up to those over their union."""
        return (
            self.kind not in ("attention_max", "attention_hits")
            and self.over_heads == "mean"
            and (self.over_layers == "mean" or len(self.layers) == 1)
            and (self.pool == "mean" or self.pool_radius == 0)
        )

    def mixed(self, attention: Rows, redundancy: Rows) -> Rows:
        """The last step: the signal [n] from the value [n] so far and the redundancy [n]."""
        share: Any = self.mix_lambda
        found: Rows = share * attention - (1 - share) * redundancy
        return found

    def num_rows(self, num_queries: int) -> int:
        """How many of a step's newest `num_queries` matter."""
        if self.kind == "attention_sum":
            return num_queries
        return min(num_queries, self.window_queries or 1)

    def num_pooled(self, num_live: int) -> int:
        """How many of `num_live` tokens, the oldest, are pooled over neighbours."""
        return max(0, num_live - max(self.window_queries, 1)) if self.pool_radius else 0

    def __str__(self) -> str:
        parts = []
        for name, numbers in (("layer", self.layers), ("head", self.heads)):
            if numbers:
                many = "s" if len(numbers) > 1 else ""
                parts.append(f"{name}{many} {', '.join(map(str, numbers))}")
        parts += [
            f"max over {n}" for n in ("heads", "layers") if getattr(self, f"over_{n}") == "max"
        ]
        if self.pool_radius:
            parts.append(f"{self.pool} over {self.pool_radius} neighbours a side")
        if self.is_mixed:
            parts.append(f"less redundancy, lambda {self.mix_lambda:g}")
        kind = f"{self.kind}({self.window_queries})" if self.window_queries else self.kind
        return f"{kind} ({'; '.join(parts)})" if parts else kind


class Accumulator(Generic[Rows]):
    """Accumulates the attention rows of one request; `make_accumulator` picks the subclass.

    `num_tokens`: the request's tokens at the last `add`; `ids` [n]: the live ones among them.
    `num_queries`: queries probed so far.
    """

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.ids: Ints = NO_IDS
        self.num_tokens = 0
        self.num_queries = 0
        self._complete = True  # every query since the first token was probed

    def add(self, ids: Ints, rows: Rows, num_queries: int) -> None:
        """Add one step's `rows` [k, n] over the live `ids` [n].

        The step's queries are its `num_queries` newest tokens. `ids` ascend and end with them.
        `rows` are those of the newest `signal.num_rows(num_queries)` queries, oldest first; for
        attention_sum, their sum [1, n].
        """
        num_tokens = int(ids[-1]) + 1
        self._complete &= self.num_tokens + num_queries == num_tokens
        self.num_tokens = num_tokens
        self.num_queries += num_queries
        self._add(ids, rows)
        self.ids = ids

    def scores(self) -> Rows | None:
        """The signal of the tokens `ids` [n] before redundancy is mixed in; None while it rests on
        too few queries. A later `add` may overwrite the array.
        """
        if not self._is_ready():
            return None
        return self._pooled(self._scores())

    def _is_ready(self) -> bool:
        if self.signal.kind == "attention_last":
            return self.num_queries > 0
        needed = min(self.signal.window_queries or WARM_QUERIES, WARM_QUERIES)
        return self.num_queries > 0 and (self._complete or self.num_queries >= needed)

    def _add(self, ids: Ints, rows: Rows) -> None:
        """Add `rows` over `ids`; `self.ids` are still those of the previous `add`."""
        raise NotImplementedError

    def _scores(self) -> Rows:
        """The numbers of `ids` [n] before they are pooled."""
        raise NotImplementedError

    def _pooled(self, values: Rows) -> Rows:
        raise NotImplementedError


class HostAccumulator(Accumulator[Floats]):
    """Base of the accumulators of numpy arrays."""

    def _pooled(self, values: Floats) -> Floats:
        return pooled(self.signal, values)


class SumAccumulator(HostAccumulator):
    """The sum of all rows: one float a token."""

    def __init__(self, signal: Signal) -> None:
        super().__init__(signal)
        self._sums = np.zeros(0, dtype=np.float32)

    def _add(self, ids: Ints, rows: Floats) -> None:
        if len(self._sums) < self.num_tokens:
            grown = np.zeros(self.num_tokens + self.num_tokens // 2, dtype=np.float32)
            grown[: len(self._sums)] = self._sums
            self._sums = grown
        self._sums[ids] += rows[0]

    def _scores(self) -> Floats:
        sums: Floats = self._sums[self.ids]
        return sums


class LastAccumulator(HostAccumulator):
    """The newest row."""

    def _add(self, ids: Ints, rows: Floats) -> None:  # noqa: ARG002
        self._row = rows[-1]

    def _scores(self) -> Floats:
        row: Floats = self._row
        return row


class RingAccumulator(HostAccumulator):
    """The newest W rows over the live tokens; the columns of dead tokens are dropped.

    `_data` [rows, capacity]: column j belongs to token `ids[j]`. Capacity follows the number of
    live tokens, so memory is proportional to a request's budget, not to its length.
    """

    _num_rows: int
    _dtype: type[np.generic]

    def __init__(self, signal: Signal) -> None:
        super().__init__(signal)
        self._data: npt.NDArray[Any] = np.zeros((self._num_rows, 0), dtype=self._dtype)
        self._next = 0  # the query slot 0 .. W - 1 that is written next

    def _align(self, ids: Ints) -> None:
        """Make column j that of `ids[j]`: drop dead tokens, add zeros for new ones."""
        before = self.ids
        known = int(np.searchsorted(ids, before[-1] + 1)) if len(before) else 0
        num_ids, capacity = len(ids), self._data.shape[1]
        kept = slice(0, known)
        if known < len(before):
            columns = np.searchsorted(before, ids[kept])
            self._data[:, kept] = self._data[:, columns]
        if not num_ids <= capacity <= 4 * num_ids + 64:
            shape = (len(self._data), num_ids + num_ids // 4 + 16)
            moved = np.zeros(shape, dtype=self._dtype)
            moved[:, kept] = self._data[:, kept]
            self._data = moved
        self._data[:, known:num_ids] = 0

    def _slots(self, num_rows: int) -> Ints:
        """The query slots [num_rows] of the newest rows."""
        window = self.signal.window_queries
        slots = (self._next + np.arange(num_rows)) % window
        self._next = (self._next + num_rows) % window
        return slots


class WindowAccumulator(RingAccumulator):
    """W rows of floats: 4 * W bytes a live token."""

    def __init__(self, signal: Signal) -> None:
        self._num_rows, self._dtype = signal.window_queries, np.float32
        super().__init__(signal)

    def _add(self, ids: Ints, rows: Floats) -> None:
        self._align(ids)
        self._data[self._slots(len(rows)), : len(ids)] = rows

    def _scores(self) -> Floats:
        rows = self._data[: min(self.num_queries, self.signal.window_queries), : len(self.ids)]
        is_max = self.signal.kind == "attention_max"
        scores: Floats = rows.max(axis=0) if is_max else rows.mean(axis=0)
        return scores


class HitsAccumulator(RingAccumulator):
    """W rows of bits, eight queries a byte: W / 8 bytes a live token."""

    def __init__(self, signal: Signal) -> None:
        self._num_rows, self._dtype = -(-signal.window_queries // 8), np.uint8
        super().__init__(signal)

    def _add(self, ids: Ints, rows: Floats) -> None:
        self._align(ids)
        num_rows, num_ids = rows.shape
        num_seen = np.arange(num_ids - num_rows + 1, num_ids + 1, dtype=np.float32)
        hits = rows * num_seen[:, None] >= 1
        for slot, hit in zip(self._slots(num_rows).tolist(), hits, strict=True):
            byte, bit = self._data[slot // 8, :num_ids], np.uint8(1 << slot % 8)
            byte &= ~bit
            byte |= hit * bit

    def _scores(self) -> Floats:
        counts = np.bitwise_count(self._data[:, : len(self.ids)])
        hits: Floats = counts.sum(axis=0, dtype=np.float32)
        return hits


def pooled(signal: Signal, values: Floats) -> Floats:
    """`values` [n] of live tokens in the order of ids, each aggregated with its neighbours."""
    count, radius = signal.num_pooled(len(values)), signal.pool_radius
    if not count:
        return values
    before = values[:count]
    if signal.pool == "mean":
        kernel = np.full(2 * radius + 1, 1 / (2 * radius + 1), dtype=np.float32)
        around = np.convolve(before, kernel)[radius : radius + count]
    else:
        padded = np.pad(before, radius, constant_values=-np.inf)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1).max(axis=1)
    return np.concatenate([around, values[count:]])


def redundancy(keys: Floats) -> Floats:
    """The redundancy of each token's key among `keys` [..., n, D] of one head: [..., n], sum 1.

    Let s[i, t] be the cosine of the keys of i and t, with s[t, t] = 0, and in each row i the newest
    t with s[i, t] > `SIMILAR` set to 0 (the oldest token if there is none). The redundancy is the
    softmax over t of the mean over i of s[i, t]. Of three similar keys the oldest is the most
    redundant; of two neither is. O(n^2 D) time, O(n^2) memory. Source: `cal_similarity` of R-KV
    (arXiv 2505.24133).
    """
    unit = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    cosine = unit @ np.swapaxes(unit, -1, -2)
    places = np.arange(cosine.shape[-1])
    cosine[..., places, places] = 0
    newest = np.where(cosine > SIMILAR, places, 0).max(axis=-1, keepdims=True)
    np.put_along_axis(cosine, newest, 0, axis=-1)
    mean = cosine.mean(axis=-2)
    weights = np.exp(mean - mean.max(axis=-1, keepdims=True))
    found: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return found


def by_id(ids: Ints, values: Floats, num_tokens: int) -> Floats:
    """`values` [n] of the tokens `ids` [n], indexed by token id [num_tokens], 0 for others."""
    out = np.zeros(num_tokens, dtype=np.float32)
    out[ids] = values
    return out


_ACCUMULATORS: dict[Kind, type[HostAccumulator]] = {
    "attention_sum": SumAccumulator,
    "attention_last": LastAccumulator,
    "attention_window": WindowAccumulator,
    "attention_max": WindowAccumulator,
    "attention_hits": HitsAccumulator,
}


def make_accumulator(signal: Signal) -> HostAccumulator:
    """The accumulator of an attention signal."""
    return _ACCUMULATORS[signal.kind](signal)
