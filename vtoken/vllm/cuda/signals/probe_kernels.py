"""Triton kernels of the attention score probe: one row of attention for each single query.

Imported only if Triton is used. `docs/gpu.md` has their speed on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vtoken.vllm.worker.limits import MAX_LOGITS

ALIGNMENT = 16  # logits; rows of that many load whole vectors
TILES_AT_ONCE = 64  # constant, because compiling a kernel for every length would stall the engine
HEADS_AT_ONCE = 32  # 5% faster than 8 on an H200, with 1 to 64 requests of 2,048 or 8,192 tokens


@triton.jit(do_not_specialize=["width", "tiles"])
def _probe_logits_kernel(
    query,  # [T, Hq, D]
    key,  # [slots, H, D] by strides
    table,  # [rows, n] int32: slots in logical order
    queries,  # [R] int32: row of `query`
    table_rows,  # [R] int32: row of `table`
    seq_lens,  # [R] int32
    logits,  # [R, Hq, width] float32
    tile_max,  # [R, Hq, tiles]
    tile_sum,  # [R, Hq, tiles]
    scale,
    soft_cap,
    query_row,
    key_slot,
    key_head,
    table_row,
    width,
    tiles,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # logits; a divisor of `width`
):
    width = tl.multiple_of(width, ALIGNMENT)
    request, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + request)
    token = tile * TILE + tl.arange(0, TILE)
    live = token < length
    pages = table + tl.load(table_rows + request).to(tl.int64) * table_row
    slot = tl.load(pages + token, mask=live, other=0).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    member = tl.arange(0, GROUP_PAD)
    q_head = head * GROUP + member
    is_head = member < GROUP
    q_row = query + tl.load(queries + request).to(tl.int64) * query_row
    q = tl.load(
        q_row + q_head[:, None] * D + dim[None, :],
        mask=is_head[:, None] & (dim[None, :] < D),
        other=0.0,
    )
    k = tl.load(
        key + slot[None, :] * key_slot + head * key_head + dim[:, None],
        mask=live[None, :] & (dim[:, None] < D),
        other=0.0,
    )
    x = tl.dot(q, k, input_precision="ieee") * scale
    if CAPPED:  # soft_cap * tanh(x / soft_cap)
        x = soft_cap * (2.0 * tl.sigmoid(2.0 * x / soft_cap) - 1.0)
    x = tl.where(live[None, :], x, float("-inf"))
    top = tl.max(x, axis=1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - safe[:, None]), axis=1)
    num_q_heads = tl.num_programs(1) * GROUP
    row = request.to(tl.int64) * num_q_heads + q_head
    tl.store(
        logits + row[:, None] * width + token[None, :],
        x,
        mask=is_head[:, None] & live[None, :],
    )
    tl.store(tile_max + row * tiles + tile, top, mask=is_head)
    tl.store(tile_sum + row * tiles + tile, total, mask=is_head)


@triton.jit(do_not_specialize=["tiles"])
def _probe_norm_kernel(
    tile_max,  # [R, Hq, tiles]
    tile_sum,
    sinks,  # [Hq] float32: one more logit of every head, -inf for none
    norms,  # [R, Hq] float32: the logarithm of the sum of exp(logit)
    tiles,
    TILES: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    top = tl.zeros((1,), dtype=tl.float32) + tl.load(sinks + head)
    total = tl.full((1,), 1.0, dtype=tl.float32)  # exp(sink - top)
    for start in range(0, tiles, TILES):  # the first tile has a live token, so top is finite
        part = start + tl.arange(0, TILES)
        tops = tl.load(tile_max + row * tiles + part, mask=part < tiles, other=float("-inf"))
        sums = tl.load(tile_sum + row * tiles + part, mask=part < tiles, other=0.0)
        higher = tl.maximum(top, tl.max(tops, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(sums * tl.exp(tops - higher), axis=0)
        top = higher
    tl.store(norms + row + tl.arange(0, 1), top + tl.log(total))


@triton.jit(do_not_specialize=["width", "score_row"])
def _probe_sum_kernel(
    logits,  # [R, Hq, width]
    norms,  # [R, Hq]
    seq_lens,
    scores,  # [R, n] float32, added to
    chosen,  # [c] int32: heads to aggregate
    num_chosen,
    divisor,
    score_row,
    width,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE: tl.constexpr,
    USE_MAX: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # logits; a divisor of `width`
):
    width = tl.multiple_of(width, ALIGNMENT)
    request, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + request)
    token = tile * TILE + tl.arange(0, TILE)
    live = token < length
    total = tl.zeros((TILE,), dtype=tl.float32)
    for first in range(0, num_chosen, AT_ONCE):
        number = first + tl.arange(0, AT_ONCE)
        exists = number < num_chosen
        head = tl.load(chosen + number, mask=exists, other=0)
        row = request.to(tl.int64) * HEADS + head
        x = tl.load(
            logits + row[:, None] * width + token[None, :],
            mask=exists[:, None] & live[None, :],
            other=float("-inf"),
        )
        weight = tl.exp(x - tl.load(norms + row)[:, None])
        if USE_MAX:
            total = tl.maximum(total, tl.max(weight, axis=0))
        else:
            total += tl.sum(weight, axis=0)
    at = scores + request * score_row + token
    before = tl.load(at, mask=live, other=0.0)
    after = tl.maximum(before, total) if USE_MAX else before + total / divisor
    tl.store(at, after, mask=live)


def probe_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    queries: torch.Tensor,
    rows: torch.Tensor,
    heads: torch.Tensor,
    sinks: torch.Tensor,
    divisor: float,
    use_max: bool = False,
    soft_cap: float = 0.0,
    tile: int = 64,
) -> None:
    """Add to `scores` [R, n] the attention of one query a request over its live tokens.

    Adds the sum over `heads` [c] of softmax(q k) / `divisor`; if `use_max`, takes the maximum over
    the heads and `scores` instead. The query of request i is row `queries[i]` of `query`
    [T, Hq, D], contiguous in (Hq, D). It reads the `seq_lens[i]` slots in row `rows[i]` of `table`
    [rows, m], in logical order; `key` [slots, H, D]. `sinks` [Hq] float32: the attention sinks,
    -inf for none. `table`, `seq_lens`, `queries`, `rows` and
    `heads` are int32. Three launches for every chunk of requests with at most `MAX_LOGITS` logits.
    """
    num_heads, dim = query.shape[1:]
    width = triton.cdiv(scores.shape[1], ALIGNMENT) * ALIGNMENT
    tiles = triton.cdiv(width, tile)
    group = num_heads // key.shape[1]
    chunk = max(1, MAX_LOGITS // (num_heads * scores.shape[1]))
    parts = [(seq_lens, scores, queries, rows)]
    if chunk < len(scores):  # else no tensor is sliced, which costs the host 1.5 µs each
        parts = [*zip(*(tensor.split(chunk) for tensor in parts[0]), strict=True)]
    for lengths, found, own_queries, table_rows in parts:
        shape = len(found), num_heads
        logits = torch.empty((*shape, width), dtype=torch.float32, device=query.device)
        tops = torch.empty((*shape, tiles), dtype=torch.float32, device=query.device)
        sums = torch.empty_like(tops)
        _probe_logits_kernel[(len(found), key.shape[1], tiles)](
            query,
            key,
            table,
            own_queries,
            table_rows,
            lengths,
            logits,
            tops,
            sums,
            scale,
            soft_cap,
            query.stride(0),
            key.stride(0),
            key.stride(1),
            table.stride(0),
            width,
            tiles,
            GROUP=group,
            GROUP_PAD=max(16, triton.next_power_of_2(group)),
            D=dim,
            D_PAD=max(16, triton.next_power_of_2(dim)),
            TILE=tile,
            CAPPED=soft_cap > 0.0,
            ALIGNMENT=ALIGNMENT,
        )
        norms = torch.empty(shape, dtype=torch.float32, device=query.device)
        _probe_norm_kernel[shape](tops, sums, sinks, norms, tiles, TILES=TILES_AT_ONCE)
        _probe_sum_kernel[(len(found), tiles)](
            logits,
            norms,
            lengths,
            found,
            heads,
            len(heads),
            float(divisor),
            found.stride(0),
            width,
            HEADS=num_heads,
            AT_ONCE=HEADS_AT_ONCE,
            TILE=tile,
            USE_MAX=use_max,
            ALIGNMENT=ALIGNMENT,
        )
