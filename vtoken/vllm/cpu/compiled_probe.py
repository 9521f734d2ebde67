"""The probe on CPU: one kernel call a layer for all requests with a single query.

Chunks of several queries use the torch probe, request by request. `vtoken.policies.signals` defines
a row. Keys are read from the cache in place, block by block, and put into the order of token ids
before anything is summed, so a row depends on which tokens are live and not on their slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vtoken.base.arrays import Bools, Floats, Ints
from vtoken.base.compiled import kernel
from vtoken.vllm.cpu.layout import Bits, KVLayout
from vtoken.vllm.worker.probe import ProbedRequest, divisor_of, probe

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
PARTS = 8  # a dot product is summed in this many independent parts

LOG2_E = np.float32(1.44269504)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: x + ROUNDER is an integer in the low bits
ONE_BITS = 0x4B400000 - 127  # bits(x + ROUNDER) - ONE_BITS is the exponent field of 2^x
LEAST = np.float32(-87.0)  # smaller arguments of exp are clamped: exp(-87) = 1.6e-38
ONE, HALF = np.float32(1.0), np.float32(0.5)
C3, C4 = np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
C5, C6 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3)
C7 = np.float32(1.9875691500e-4)
HALF_SCALE = np.float32(2.0**112)  # float16 exponents as float32 ones


class StepProbe:
    """One step's probes. Rows start at zero; `add` adds one layer's attention.

    Requests with a single query and the same aggregation over layers and heads share a ragged
    buffer of rows. `single_ns`: time spent on single queries so far; `num_single`: their number.
    """

    def __init__(self, requests: Sequence[ProbedRequest], num_blocks: int, block_size: int) -> None:
        self._chunks = [request for request in requests if request.num_new > 1]
        single: dict[Any, list[ProbedRequest]] = {}
        for request in requests:
            if request.num_new == 1:
                single.setdefault(request.row_key[1:], []).append(request)
        self._single = [SingleQueries(group, num_blocks, block_size) for group in single.values()]
        self.num_single = len({one.request_id for group in single.values() for one in group})
        self.single_ns = 0

    def add(
        self,
        layer: int,
        query: torch.Tensor,
        cache: torch.Tensor,
        layout: KVLayout,
        *,
        scale: float,
        soft_cap: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Add the attention of `layer`'s `query` [T, Hq, D] over the keys in `cache` [N, H, S, 2D].

        `sinks` [Hq]: the layer's attention sinks. Does nothing if no request is probed on it.
        """
        started = time.perf_counter_ns()
        for single in self._single:
            if layer in single.signal.layers:
                single.add(layer, query, cache, layout, scale, soft_cap, sinks)
        self.single_ns += time.perf_counter_ns() - started
        if self._chunks:
            keys, _ = layout.views(cache)
            probe(self._chunks, layer, query, keys, scale=scale, soft_cap=soft_cap, sinks=sinks)


class SingleQueries:
    """Requests with a single query and the same aggregation over layers and heads, as columns.

    `signal`: that of one of them.

    Request r has the live tokens starts[r] .. starts[r + 1] of `rows` and of `_place`, by id, and
    the blocks block_starts[r] .. block_starts[r + 1] of `_blocks`, each once. Token j is element
    place[j] of the logits of its blocks, block after block:

        slot j = blocks[block_starts[r] + place[j] // S] * S + place[j] % S
    """

    def __init__(self, requests: list[ProbedRequest], num_blocks: int, block_size: int) -> None:
        self.signal, self._heads = requests[0].signal, requests[0].heads
        distinct: list[ProbedRequest] = []
        row_of: list[int] = []  # of each of `requests`; signals of one request share a row
        for request in requests:
            if not distinct or distinct[-1].request_id != request.request_id:
                distinct.append(request)
            row_of.append(len(distinct) - 1)
        self._first = torch.tensor([request.first for request in distinct])
        slots = np.concatenate([request.slots.numpy() for request in distinct])
        self._starts = np.zeros(len(distinct) + 1, dtype=np.int64)
        np.cumsum([len(request.slots) for request in distinct], out=self._starts[1:])
        self._place = np.empty(len(slots), dtype=np.int64)
        blocks = np.empty(len(slots), dtype=np.int64)
        self._block_starts = np.zeros(len(distinct) + 1, dtype=np.int64)
        index = np.full(num_blocks, -1, dtype=np.int64)
        wrong = group_by_block(
            slots, self._starts, block_size, index, blocks, self._block_starts, self._place
        )
        if wrong >= 0:
            raise IndexError(f"slot {slots[wrong]} is not in a cache of {num_blocks} blocks")
        self._blocks = blocks
        self.rows: Floats = np.zeros((self.signal.parts, len(slots)), dtype=np.float32)
        for request, row in zip(requests, row_of, strict=True):
            part = self.rows[:, self._starts[row] : self._starts[row + 1]]
            request.rows = torch.from_numpy(part)[:, None]
        self._max_slots = int(np.diff(self._block_starts).max()) * block_size
        self._scratch: Floats = np.empty(0, dtype=np.float32)

    def add(
        self,
        layer: int,
        query: torch.Tensor,
        cache: torch.Tensor,
        layout: KVLayout,
        scale: float,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> None:
        signal = self.signal
        heads, head_size = query.shape[1:]
        own = self._heads.own(signal, heads)
        if own == []:
            return
        chosen = np.ones(heads, dtype=np.bool_)
        if own is not None:
            chosen[:] = False
            chosen[own] = True
        sink: Floats = np.full(heads, -np.inf, dtype=np.float32)
        if sinks is not None:
            sink[:] = sinks.detach().float().numpy()
        memory = layout.memory(cache)
        group = heads // cache.shape[1]
        block = cache.shape[2] * head_size
        size = (group + 1) * self._max_slots + (group + 2) * block
        if len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.float32)
        add_rows(
            memory.bits,
            memory.shape,
            FORMATS[cache.dtype],
            query[self._first].float().numpy().reshape(len(self._first), -1),
            self._starts,
            self._blocks,
            self._block_starts,
            self._place,
            self._scratch,
            np.float32(scale),
            np.float32(soft_cap),
            sink,
            chosen,
            np.float32(divisor_of(signal, self._heads, heads)),
            signal.over_heads == "max",
            self.rows[signal.layers.index(layer) if signal.parts > 1 else 0],
        )


@kernel
def group_by_block(
    slots: Ints,
    starts: Ints,
    block_size: int,
    index: Ints,
    blocks: Ints,
    block_starts: Ints,
    place: Ints,
) -> int:
    """Find the distinct blocks of each request's `slots`, and the places of its tokens in them.

    Fills `blocks`, `block_starts` and `place`, see `SingleQueries`. `index` [N] holds -1 before and
    after. Returns -1, or the position of a slot outside the N blocks.
    """
    found = 0
    for r in range(len(starts) - 1):
        first = found
        for j in range(starts[r], starts[r + 1]):
            block = slots[j] // block_size
            if block < 0 or block >= len(index):
                return j
            if index[block] < 0:
                index[block] = found
                blocks[found] = block
                found += 1
            place[j] = (index[block] - first) * block_size + slots[j] % block_size
        for b in range(first, found):
            index[blocks[b]] = -1
        block_starts[r + 1] = found
    return -1


@kernel
def add_rows(
    bits: Bits,
    shape: Ints,
    form: int,
    query: Floats,
    starts: Ints,
    blocks: Ints,
    block_starts: Ints,
    place: Ints,
    scratch: Floats,
    scale: np.float32,
    soft_cap: np.float32,
    sinks: Floats,
    chosen: Bools,
    divisor: np.float32,
    use_max: bool,
    rows: Floats,
) -> None:
    """Add to `rows` the attention of one query a request over the `chosen` [Hq] heads.

    `bits`, `shape`: the cache's `Memory`; `form`: the format of its elements. `query` [R, Hq * D].
    `scratch`: (G + 1) * m + (G + 2) * S * D floats, G the query heads of a KV head, m the largest
    number of slots in the blocks of one request. `sinks` [Hq]: one more logit of every head, -inf
    for none. m_h is the greatest of head h's logits and its sink s_h.

        a_hj = exp(x_hj - m_h) / ((exp(s_h - m_h) + sum of exp(x_h - m_h)) * divisor)
        rows[j] += sum over heads h of a_hj; if `use_max`, the maximum of rows[j] and all a_hj
    """
    kv_heads, block_size, head_size = shape[1], shape[2], shape[3]
    size = block_size * head_size
    num_heads = query.shape[1] // head_size
    group = num_heads // kv_heads
    spread = scratch[: group * size].reshape(group, size)
    keys = scratch[group * size : (group + 1) * size]
    sums = scratch[(group + 1) * size : (group + 1) * size + size // PARTS]
    rest = scratch[(group + 2) * size :]
    in_place = form == FLOAT32 and shape[7] == 1 and shape[8] == block_size
    for r in range(len(starts) - 1):
        first, end = starts[r], starts[r + 1]
        num_slots = (block_starts[r + 1] - block_starts[r]) * block_size
        logits = rest[: group * num_slots].reshape(group, num_slots)
        row = rest[group * num_slots : group * num_slots + end - first]
        for kv_head in range(kv_heads):
            if not chosen[kv_head * group : (kv_head + 1) * group].any():
                continue
            for g in range(group):
                head = (kv_head * group + g) * head_size
                for d in range(head_size):
                    spread[g, d * block_size : (d + 1) * block_size] = query[r, head + d]
            for b in range(block_starts[r], block_starts[r + 1]):
                at = blocks[b] * shape[4] + kv_head * shape[5] + shape[6]
                to = (b - block_starts[r]) * block_size
                if in_place:
                    keys = bits[at : at + size].view(np.float32)
                else:
                    load_keys(bits[at:], shape[7], shape[8], form, block_size, keys)
                for g in range(group):
                    dots(keys, spread[g], sums, logits[g, to : to + block_size])
            for g in range(group):
                if not chosen[kv_head * group + g]:
                    continue
                sink = sinks[kv_head * group + g]
                taken = softmax(logits[g], place[first:end], scale, soft_cap, sink, row)
                weight = ONE / ((sum_of(row) + taken) * divisor)
                if use_max:
                    max_scaled(row, weight, rows[first:end])
                else:
                    add_scaled(row, weight, rows[first:end])


@kernel
def load_keys(
    bits: Bits, token_stride: int, dim_stride: int, form: int, block_size: int, keys: Floats
) -> None:
    """Load the keys of one head of one block as float32 into `keys` [D * S]."""
    if token_stride == 1 and dim_stride == block_size:
        elements = bits[: len(keys)]
        for e in range(len(keys)):
            keys[e] = as_float32(elements[e], form)
        return
    for d in range(len(keys) // block_size):
        for o in range(block_size):
            element = bits[d * dim_stride + o * token_stride]
            keys[d * block_size + o] = as_float32(element, form)


@kernel
def as_float32(element: Any, form: int) -> np.float32:
    """The value of an element's bits; an infinite float16 becomes a large number."""
    x = np.uint32(element)
    if form == FLOAT32:
        return x.view(np.float32)
    if form == BFLOAT16:
        return np.uint32(x << np.uint32(16)).view(np.float32)
    size = np.uint32((x & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * HALF_SCALE
    return -size if x & np.uint32(0x8000) else size


@kernel(fastmath={"contract"})
def dots(keys: Floats, query: Floats, sums: Floats, logits: Floats) -> None:
    """`logits` [S] = q k of one query with the keys of one block, `keys` [D * S].

    `query` [D * S] repeats each element S times, so that one loop covers a block. The products of
    every token are summed in the same order.

        sums[c * S + o] = sum over p of the products at dimension c + p * D / 8, p < 8
    """
    n = len(sums)
    q0, q1, q2, q3 = query[:n], query[n : 2 * n], query[2 * n : 3 * n], query[3 * n : 4 * n]
    q4, q5, q6, q7 = (
        query[4 * n : 5 * n],
        query[5 * n : 6 * n],
        query[6 * n : 7 * n],
        query[7 * n : 8 * n],
    )
    k0, k1, k2, k3 = keys[:n], keys[n : 2 * n], keys[2 * n : 3 * n], keys[3 * n : 4 * n]
    k4, k5, k6, k7 = (
        keys[4 * n : 5 * n],
        keys[5 * n : 6 * n],
        keys[6 * n : 7 * n],
        keys[7 * n : 8 * n],
    )
    for e in range(n):
        sums[e] = ((q0[e] * k0[e] + q1[e] * k1[e]) + (q2[e] * k2[e] + q3[e] * k3[e])) + (
            (q4[e] * k4[e] + q5[e] * k5[e]) + (q6[e] * k6[e] + q7[e] * k7[e])
        )
    size = len(logits)
    for o in range(size):
        logits[o] = sums[o]
    for c in range(1, n // size):
        part = sums[c * size : (c + 1) * size]
        for o in range(size):
            logits[o] += part[o]


@kernel
def softmax(
    logits: Floats,
    place: Ints,
    scale: np.float32,
    soft_cap: np.float32,
    sink: np.float32,
    row: Floats,
) -> np.float32:
    """`row` [n] = exp(x - m) of x = the scaled `logits` at `place` [n]; returns exp(sink - m).

    m is the greatest of x and `sink`.
    """
    if soft_cap > 0:
        for j in range(len(row)):
            row[j] = soft_cap * np.float32(math.tanh(logits[place[j]] * scale / soft_cap))
    else:
        for j in range(len(row)):
            row[j] = logits[place[j]] * scale
    greatest = max(row[0], sink)
    for j in range(len(row)):
        greatest = max(greatest, row[j])
    exp(row, greatest)
    return np.float32(math.exp(sink - greatest))


@kernel(fastmath={"contract"})
def exp(row: Floats, greatest: np.float32) -> None:
    """`row` becomes exp(row - greatest), within 2 units of the last place of float32.

    exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, exp(r) by its series.
    """
    for j in range(len(row)):
        x = max(row[j] - greatest, LEAST)
        shifted = np.float32(x * LOG2_E + ROUNDER)
        n = shifted - ROUNDER
        r = (x - n * LN2_HIGH) - n * LN2_LOW
        p = C7 * r + C6
        p = p * r + C5
        p = p * r + C4
        p = p * r + C3
        p = p * r + HALF
        p = p * r * r + r + ONE
        power = np.int32((shifted.view(np.int32) - ONE_BITS) << 23)
        row[j] = p * power.view(np.float32)


@kernel(fastmath={"contract", "reassoc"})
def sum_of(row: Floats) -> np.float32:
    total = np.float32(0.0)
    for j in range(len(row)):
        total += row[j]
    return total


@kernel(fastmath={"contract"})
def add_scaled(row: Floats, weight: np.float32, total: Floats) -> None:
    for j in range(len(row)):
        total[j] += row[j] * weight


@kernel
def max_scaled(row: Floats, weight: np.float32, total: Floats) -> None:
    for j in range(len(row)):
        total[j] = max(total[j], row[j] * weight)
