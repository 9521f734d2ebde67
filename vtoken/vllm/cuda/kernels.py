"""Triton kernels of the CUDA worker: slot copy over all layers, a step's page tables, and the
attention score probe.

Imported only if Triton is used. Tests run both in Triton's interpreter on a CPU, which checks their
logic and not their speed, and compile both; docs/gpu.md has their speed on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vtoken.vllm.cuda.pages import ROW_ALIGNMENT, PageTables
from vtoken.vllm.worker.limits import MAX_LOGITS

MAX_WORDS = 2048  # 32-bit words of a row that one program copies at once
TOKENS_PER_PROGRAM = 4
MAX_ALIGNMENT = 16  # bytes of the widest load
TILES_AT_ONCE = 64  # constant, because compiling a kernel for every length would stall the engine
COLUMNS_PER_PROGRAM = 1024
HEADS_AT_ONCE = 32  # 5% faster than 8 on an H200, with 1 to 64 requests of 2,048 or 8,192 tokens


@triton.jit
def _copy_slots_kernel(
    bases,  # [L] int64: address of each layer's row 0
    source,  # [k] int64
    destination,  # [k] int64
    num_tokens,
    row_words,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every row; 16 make loads of 128 bits
):
    layer = tl.program_id(1)
    base = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(tl.int32)), ALIGNMENT)
    for i in tl.static_range(TOKENS):
        token = tl.program_id(0) * TOKENS + i
        exists = token < num_tokens
        src = tl.load(source + token, mask=exists, other=0) * row_words
        dst = tl.load(destination + token, mask=exists, other=0) * row_words
        for start in range(0, row_words, WORDS):
            word = start + tl.arange(0, WORDS)
            mask = word < tl.where(exists, row_words, 0)
            tl.store(base + dst + word, tl.load(base + src + word, mask=mask), mask=mask)


class TritonSlotCopy:
    """Copies slots; `layers`: one [N * S, row] a layer, rows contiguous, a multiple of 4 bytes."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        row = layers[0]
        row_bytes = row.shape[1] * row.element_size()
        if row_bytes % 4:
            raise ValueError(f"a row of {row_bytes} bytes is not a multiple of 4")
        self._layers = list(layers)  # keeps the memory of the addresses alive
        self._row_words = row_bytes // 4
        self._words = min(MAX_WORDS, triton.next_power_of_2(self._row_words))
        addresses = [layer.data_ptr() for layer in layers]
        self._alignment = math.gcd(MAX_ALIGNMENT, row_bytes, *addresses)
        self._bases = torch.tensor(addresses, dtype=torch.int64, device=row.device)

    def __call__(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` [k] to `destination` [k] int64 in every layer, in one launch.

        No destination may be a source: the copies are unordered.
        """
        if not len(source):
            return
        grid = (triton.cdiv(len(source), TOKENS_PER_PROGRAM), len(self._layers))
        _copy_slots_kernel[grid](
            self._bases,
            source,
            destination,
            len(source),
            self._row_words,
            WORDS=self._words,
            TOKENS=TOKENS_PER_PROGRAM,
            ALIGNMENT=self._alignment,
        )


@triton.jit(do_not_specialize=["num_rows", "block_row", "page_row"])
def _fill_tables_kernel(
    header,  # [6, num_rows] int32, see `HEADER`
    sent,  # int32
    blocks,  # [num_rows, …] int32 by strides: the block tables
    lengths,  # [num_rows] int32: tokens of positional rows
    resident,  # [rows, page_row] int32
    pages,  # [num_rows, page_row] int32
    seq_lens,  # [num_rows] int32
    slot_mapping,  # [T] int64
    num_rows,
    block_row,
    page_row,
    S: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # entries; a divisor of `page_row`
):
    page_row = tl.multiple_of(page_row, ALIGNMENT)
    row, tile = tl.program_id(0), tl.program_id(1)
    live = tl.load(header + row)
    length = live
    if live == 0:
        length = tl.load(lengths + row)
    if tile == 0:
        tl.store(seq_lens + row, length)
    if tile * TILE < length:
        old = tl.load(header + num_rows + row)
        kept = tl.load(header + 2 * num_rows + row)
        source = tl.load(header + 3 * num_rows + row)
        token = tl.load(header + 4 * num_rows + row)
        own = resident + tl.load(header + 5 * num_rows + row).to(tl.int64) * page_row
        at = tile * TILE + tl.arange(0, TILE)
        planned = at < live
        positional = (at < length) & (at >= live)
        block = tl.load(blocks + row.to(tl.int64) * block_row + at // S, mask=positional, other=0)
        before = tl.load(own + at, mask=planned & (at < kept), other=0)
        after = tl.load(sent + source + at, mask=planned & (at >= kept), other=0)
        slot = tl.where(positional, block * S + at % S, tl.where(at < kept, before, after))
        tl.store(pages + row.to(tl.int64) * page_row + at, slot, mask=at < length)
        tl.store(own + at, slot, mask=planned & (at >= kept))
        tl.store(slot_mapping + token + at, slot.to(tl.int64), mask=planned & (at >= old))


def fill_tables(
    header: torch.Tensor,
    sent: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    tables: PageTables,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    width: int,
) -> None:
    """Write the rows of `tables` for a batch of R requests, and their slots, in one launch.

    `header` [6, R], `sent`: see `vtoken.vllm.cuda.pages.HEADER`. Rows whose header is 0 are
    positional: row i has `lengths[i]` tokens in the blocks of `block_table[i]`. `slot_mapping` [T]
    int64 is written for the new tokens of the others. `width`: no row is longer.
    """
    rows, columns = len(lengths), tables.pages.shape[1]
    if width > columns:
        raise ValueError(f"a request of {width} tokens, the page tables have {columns} columns")
    grid = (rows, triton.cdiv(width, COLUMNS_PER_PROGRAM))
    _fill_tables_kernel[grid](
        header,
        sent,
        block_table,
        lengths,
        tables.resident,
        tables.pages,
        tables.seq_lens,
        slot_mapping,
        rows,
        block_table.stride(0),
        columns,
        S=block_size,
        TILE=COLUMNS_PER_PROGRAM,
        ALIGNMENT=ROW_ALIGNMENT,
    )


@triton.jit
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
):
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


@triton.jit
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


@triton.jit
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
):
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
    width = scores.shape[1]
    chunk = max(1, MAX_LOGITS // (query.shape[1] * width))
    for start in range(0, len(scores), chunk):
        part = slice(start, start + chunk)
        _probe_chunk(
            query,
            key,
            table,
            seq_lens[part],
            scores[part],
            queries[part],
            rows[part],
            heads,
            sinks,
            scale,
            divisor,
            use_max,
            soft_cap,
            tile,
        )


def _probe_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    queries: torch.Tensor,
    rows: torch.Tensor,
    heads: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    divisor: float,
    use_max: bool,
    soft_cap: float,
    tile: int,
) -> None:
    requests, width = scores.shape
    num_heads, dim = query.shape[1:]
    tiles = triton.cdiv(width, tile)
    group = num_heads // key.shape[1]
    logits = torch.empty((requests, num_heads, width), dtype=torch.float32, device=query.device)
    tops = torch.empty((requests, num_heads, tiles), dtype=torch.float32, device=query.device)
    sums = torch.empty_like(tops)
    _probe_logits_kernel[(requests, key.shape[1], tiles)](
        query,
        key,
        table,
        queries,
        rows,
        seq_lens,
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
    )
    norms = torch.empty((requests, num_heads), dtype=torch.float32, device=query.device)
    _probe_norm_kernel[(requests, num_heads)](tops, sums, sinks, norms, tiles, TILES=TILES_AT_ONCE)
    _probe_sum_kernel[(requests, tiles)](
        logits,
        norms,
        seq_lens,
        scores,
        heads,
        len(heads),
        float(divisor),
        scores.stride(0),
        width,
        HEADS=num_heads,
        AT_ONCE=HEADS_AT_ONCE,
        TILE=tile,
        USE_MAX=use_max,
    )
