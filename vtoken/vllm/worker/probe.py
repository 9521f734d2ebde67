"""The probe: attention rows of this step's queries, and key signals, on the probed layers.

Plain torch on any device; never makes the host wait for the device.

Runs after the stock kernel and does not change it. The keys of a request's live tokens are gathered
by id, so the result depends on which tokens are live and not on their slots.
`vtoken.policies.signals.signal` defines a row and its use. A row here is one rank's part: for a
mean over heads, the sum over the rank's own heads divided by the number of all heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import NO_IDS
from vtoken.policies.signals import SIMILAR, AnchoredKeyKind, Signal
from vtoken.vllm.drafts import NO_DRAFTS
from vtoken.vllm.worker.heads import RankHeads
from vtoken.vllm.worker.limits import MAX_LOGITS

MAX_QUERIES = 256  # rows of attention in memory at once
MAX_COSINES = 1 << 20  # the same on a host: beyond the core's cache it takes twice the time
MIN_COSINE_ROWS = 64  # so that keys are read once for many rows
MAX_KEYS = 4096  # tokens whose float32 keys are in memory at once
ALL_HEADS = RankHeads()
NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class ProbedRequest:
    """Queries `first` .. `first + num_new` of the batch belong to the request of `mirror`.

    `ids` [n], `slots` [n]: its live tokens, the querying ones included, after `read`. `rows`
    [P, k, n]: the attention of the layers so far for each of the signal's `parts`, the input of
    `folded`; None before the first layer. Slots and rows are on the cache's device. While the
    newest `num_drafts` queries may still be rejected, `rows` has one row a query; `reject` brings
    it into its form.
    """

    request_id: str
    first: int
    num_new: int
    mirror: Mirror
    signal: Signal
    ids: Ints = field(default_factory=lambda: NO_IDS)
    slots: torch.Tensor = field(default_factory=lambda: NO_SLOTS)
    heads: RankHeads = ALL_HEADS
    rows: torch.Tensor | None = None
    num_drafts: int = 0

    @classmethod
    def of(
        cls,
        requests: Sequence[tuple[str, int, int, Mirror]],
        heads: RankHeads = ALL_HEADS,
        drafts: Mapping[str, int] = NO_DRAFTS,
    ) -> list[ProbedRequest]:
        """One for each signal of each mirror, those of one mirror next to each other, without
        their tokens, which not all need. `requests`: name, first query and number of queries of
        each; `drafts`: how many of these are drafts, by name.
        """
        return [
            cls(
                *(request_id, first, num_new, mirror, signal),
                heads=heads,
                num_drafts=drafts.get(request_id, 0),
            )
            for request_id, first, num_new, mirror in requests
            for signal in mirror.accumulators
        ]

    @staticmethod
    def read(probed: Sequence[ProbedRequest]) -> None:
        """Read the live tokens of `probed` from their mirrors, which are up to date."""
        if not probed:
            return
        places = {row: i for i, row in enumerate(dict.fromkeys(p.mirror.row for p in probed))}
        rows = np.fromiter(places, np.int64, len(places))
        ids, slots = probed[0].mirror.mirrors.live(rows)
        of_row = torch.from_numpy(slots.values).split(slots.counts.tolist())
        for request in probed:
            i = places[request.mirror.row]
            request.ids, request.slots = ids.of(i), of_row[i]

    @property
    def num_rows(self) -> int:
        """Rows to compute, of the newest queries."""
        return self.num_new if self.num_drafts else self.signal.num_rows(self.num_new)

    @property
    def sums_rows(self) -> bool:
        """Whether a layer adds up its rows."""
        return self.signal.sums_rows and not self.num_drafts

    def reject(self, num_rejected: int) -> None:
        """Remove the newest `num_rejected` queries, which no earlier one sees, and their tokens."""
        self.num_drafts = 0
        self.num_new -= num_rejected
        num_ids = len(self.ids) - num_rejected
        self.ids, self.slots = self.ids[:num_ids], self.slots[:num_ids]
        if self.rows is None:
            return
        rows = self.rows[:, : self.num_new, :num_ids][:, -self.num_rows :]
        self.rows = rows.sum(dim=1, keepdim=True) if self.sums_rows else rows.contiguous()

    @property
    def row_key(self) -> tuple[str, tuple[int, ...], tuple[int, ...], str, str]:
        """Single queries with equal keys share one row."""
        signal = self.signal
        aggregate = signal.layers, signal.heads, signal.over_heads, signal.over_layers
        return self.request_id, *aggregate


def divisor_of(signal: Signal, heads: RankHeads, num_heads: int) -> int:
    """The divisor with which a rank of `num_heads` query heads turns means into sums over ranks.

    It covers heads, and layers where they are aggregated together with the heads.
    """
    if signal.over_heads == "max":
        return 1
    layers = len(signal.layers) if signal.parts == 1 else 1
    return heads.total(signal, num_heads) * layers


def probe(
    requests: Sequence[ProbedRequest],
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """Add the attention of `layer`'s `query` [T, Hq, D] over `key` [N, S, Hkv, D] to the rows of
    the requests whose signals include that layer. `sinks` [Hq]: the layer's attention sinks.

    Signals of one request are adjacent in `requests`. Keys are gathered once for all of them, and a
    single query's row is computed once for all signals with the same aggregation. Longer chunks are
    computed separately for each signal, so that no signal changes another's rounding.
    """
    request_id, keys = "", torch.empty(0)
    done: dict[Any, torch.Tensor] = {}
    for request in requests:
        signal = request.signal
        if layer not in signal.layers:
            continue
        if request_id != request.request_id:
            request_id, done = request.request_id, {}
            keys = gather_keys(key, request.slots).permute(1, 2, 0)  # [Hkv, D, n]
        row_key = request.row_key if request.num_new == 1 else signal
        if row_key not in done:
            done[row_key] = _layer_rows(request, query, keys, scale, soft_cap, sinks)
        rows = done[row_key]
        if request.rows is None:
            request.rows = torch.zeros((signal.parts, *rows.shape), device=rows.device)
        part = request.rows[signal.layers.index(layer) if signal.parts > 1 else 0]
        if signal.over_heads == "max":
            torch.maximum(part, rows, out=part)
        else:
            part += rows


def folded(signal: Signal, parts: torch.Tensor) -> torch.Tensor:
    """The rows [k, n], or the key signal [n], of all layers from its `parts` [P, …]."""
    if len(parts) == 1:
        return parts[0]
    return parts.amax(dim=0) if signal.over_layers == "max" else parts.mean(dim=0)


def pooled(signal: Signal, values: torch.Tensor) -> torch.Tensor:
    """`vtoken.policies.signals.pooled` of `values` [n] on any device."""
    count, radius = signal.num_pooled(len(values)), signal.pool_radius
    if not count:
        return values
    before = values[None, :count]
    if signal.pool == "mean":
        around = torch.nn.functional.avg_pool1d(before, 2 * radius + 1, 1, radius)
    else:
        around = torch.nn.functional.max_pool1d(before, 2 * radius + 1, 1, radius)
    return torch.cat([around[0], values[count:]])


def _layer_rows(
    request: ProbedRequest,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The rows [k, n] that one layer adds to `request`; `key` [Hkv, D, n]."""
    signal, stop = request.signal, request.first + request.num_new
    num_rows = request.num_rows
    num_heads, num_ids = query.shape[1], key.shape[-1]
    own = request.heads.own(signal, num_heads)
    if own is not None:
        if not own:
            return torch.zeros(1 if request.sums_rows else num_rows, num_ids, device=query.device)
        key = _pick(key, [head * len(key) // num_heads for head in own], dim=0)
        sinks = None if sinks is None else _pick(sinks, own, dim=0)
    divisor = divisor_of(signal, request.heads, num_heads)
    chunk = max(1, min(MAX_QUERIES, MAX_LOGITS // (num_heads * num_ids)))
    parts = []
    for start in range(stop - num_rows, stop, chunk):
        end = min(start + chunk, stop)
        queries = query[start:end]
        if own is not None:
            queries = _pick(queries, own, dim=1)
        weights = _weights(queries.float(), key, stop - end, scale, soft_cap, sinks)
        rows = weights.amax(dim=0) if signal.over_heads == "max" else weights.sum(dim=0) / divisor
        parts.append(rows.sum(dim=0, keepdim=True) if request.sums_rows else rows)
    return torch.stack(parts).sum(dim=0) if request.sums_rows else torch.cat(parts)


def gather_keys(key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys [n, Hkv, D] float32 of `key` [N, S, Hkv, D] at `slots` [n]."""
    block_size = key.shape[1]
    return key[slots // block_size, slots % block_size].float()


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    num_later: int,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [Hq, q, n] of `query` [q, Hq, D] over `key` [H, D, n], H a divisor of Hq.

    The queries are those of the newest tokens; `num_later` more follow the last one given here. A
    sink of `sinks` [Hq] is one more logit of its head: it takes attention that no token gets.
    """
    num_queries, num_heads, head_size = query.shape
    num_key_heads, _, num_ids = key.shape
    grouped = query.transpose(0, 1).reshape(num_key_heads, -1, head_size)  # [H, Hq / H * q, D]
    logits = torch.matmul(grouped, key) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.view(num_heads, num_queries, num_ids)
    newest = num_ids - num_later - num_queries  # column of the first query's own token
    hidden = torch.ones(num_queries, num_ids, dtype=torch.bool, device=query.device)
    hidden = hidden.triu(newest + 1)
    logits.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    column = sinks.float()[:, None, None].expand(-1, num_queries, 1)
    return torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]


def key_values(
    signal: Signal,
    slots: torch.Tensor,
    layers: Mapping[int, torch.Tensor],
    num_heads: int,
    heads: RankHeads = ALL_HEADS,
    anchors: dict[int, torch.Tensor] | None = None,
    num_new: int = 0,
) -> torch.Tensor:
    """A rank's part [P, n] of a key signal of the tokens in `slots` [n], the input of `folded`.

    `layers`: the keys [N, S, Hkv, D] of this stage's layers, by their index in the signal's.
    `num_heads`: query heads of this rank. `anchors` as in `SeenKeys`: the newest `num_new` tokens
    are added to them; None: the anchor is that of the tokens in `slots`.
    """
    use_max = signal.over_heads == "max"
    empty = float("-inf") if use_max else 0.0
    parts = torch.full((signal.parts, len(slots)), empty, device=slots.device)
    own = heads.own(signal, num_heads)
    if own == []:
        return parts
    divisor = divisor_of(signal, heads, num_heads)
    for number, layer in layers.items():
        num_kv_heads = layer.shape[2]
        anchor = None
        if anchors is not None:
            if number not in anchors:
                anchors[number] = torch.zeros(num_kv_heads, layer.shape[3], device=slots.device)
            anchor = anchors[number]
        values = _by_head(signal, slots, layer, anchor, num_new)
        if own is not None:
            values = _pick(values, [head * num_kv_heads // num_heads for head in own], dim=1)
        part = parts[number if signal.parts > 1 else 0]
        if use_max:
            torch.maximum(part, values.amax(dim=1), out=part)
        else:  # a KV head is weighted by the number of query heads that read it
            readers = 1 if own is not None else num_heads // num_kv_heads
            part += values.sum(dim=1) * (readers / divisor)
    return parts


def _by_head(
    signal: Signal,
    slots: torch.Tensor,
    layer: torch.Tensor,
    anchor: torch.Tensor | None,
    num_new: int,
) -> torch.Tensor:
    """The key signal [n, Hkv] of each KV head of `layer` [N, S, Hkv, D]. Adds the newest `num_new`
    tokens to the `anchor` [Hkv, D], if there is one.

    As many heads at once as have `MAX_KEYS` keys of all heads, and at least one.
    """
    kind, num_kv_heads = signal.definition, layer.shape[2]
    at_once = max(1, MAX_KEYS * num_kv_heads // len(slots))
    found = []
    for first in range(0, num_kv_heads, at_once):
        heads = slice(first, first + at_once)
        keys = gather_keys(layer[:, :, heads], slots).transpose(0, 1)
        if anchor is None:
            found.append(kind.numbers(keys))
            continue
        assert isinstance(kind, AnchoredKeyKind)
        anchor[heads] += kind.summands(keys[:, len(slots) - num_new :]).sum(dim=1)
        found.append(kind.against(keys, anchor[heads]))
    return torch.cat(found).transpose(0, 1)


def key_redundancy(
    signal: Signal,
    slots: torch.Tensor,
    layers: Sequence[torch.Tensor],
    num_heads: int,
    heads: RankHeads = ALL_HEADS,
) -> torch.Tensor:
    """A rank's part [n] of the redundancy of the tokens in `slots` [n]; the parts of ranks and of
    stages add up.

    `layers`: the keys of this stage's layers; `num_heads` as in `key_values`. Takes O(n^2) time for
    each KV head that is read, and memory for the normalised keys of one layer.
    """
    found = torch.zeros(len(slots), device=slots.device)
    own = heads.own(signal, num_heads)
    total = heads.total(signal, num_heads) * len(signal.layers)
    for layer in layers:
        num_kv_heads = layer.shape[2]
        readers = Counter(
            head * num_kv_heads // num_heads for head in (range(num_heads) if own is None else own)
        )
        if not readers:
            continue
        chunks = [gather_keys(layer, chunk) for chunk in slots.split(MAX_KEYS)]
        unit = torch.cat([_unit(_pick(keys, [*readers], dim=1)) for keys in chunks])
        of_heads = redundancy(unit.transpose(0, 1))
        for values, count in zip(of_heads, readers.values(), strict=True):
            found += values * (count / total)
    return found


def redundancy(unit: torch.Tensor) -> torch.Tensor:
    """`vtoken.policies.signals.redundancy` [H, n] of normalised keys [H, n, D], on any device.

    Cosines are computed in chunks of rows.
    """
    num_heads, num_tokens, _ = unit.shape
    columns = unit.transpose(1, 2)
    places = torch.arange(num_tokens, dtype=torch.int32, device=unit.device)
    sums = torch.zeros(num_heads, num_tokens, device=unit.device)
    max_cosines = MAX_COSINES if unit.device.type == "cpu" else MAX_LOGITS
    chunk = max(MIN_COSINE_ROWS, max_cosines // (num_heads * num_tokens))
    for start in range(0, num_tokens, chunk):
        cosine = torch.matmul(unit[:, start : start + chunk], columns)
        cosine.diagonal(start, 1, 2).zero_()
        newest = (cosine > SIMILAR).mul(places).amax(dim=-1, keepdim=True)
        cosine.scatter_(-1, newest.long(), 0.0)
        sums += cosine.sum(dim=1)
    return torch.softmax(sums / num_tokens, dim=-1)


def _pick(tensor: torch.Tensor, numbers: Sequence[int], dim: int) -> torch.Tensor:
    """The slices `numbers` of `tensor` along `dim`, without an index tensor, whose upload waits."""
    return torch.stack([tensor.select(dim, number) for number in numbers], dim)


def _unit(key: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(key, dim=-1)
