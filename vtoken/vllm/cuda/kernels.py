"""Triton kernels of the CUDA worker: copies of slots over all layers, and a step's page tables.

`vtoken.vllm.cuda.signals.kernels` has those of signals.

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

MAX_WORDS = 2048  # 32-bit words of a row that one program copies at once
TOKENS_PER_PROGRAM = 4
MAX_ALIGNMENT = 16  # bytes of the widest load
COLUMNS_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["num_tokens"])
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


class SlotRows:
    """The addresses of `layers`, one [N * S, row] each, rows contiguous, a multiple of 4 bytes."""

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

    def _grid(self, num_tokens: int) -> tuple[int, int]:
        return triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), len(self._layers)


class TritonSlotCopy(SlotRows):
    """Copies slots to slots."""

    def __call__(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` [k] to `destination` [k] int64 in every layer, in one launch.

        No destination may be a source: the copies are unordered.
        """
        if not len(source):
            return
        _copy_slots_kernel[self._grid(len(source))](
            self._bases,
            source,
            destination,
            len(source),
            self._row_words,
            WORDS=self._words,
            TOKENS=TOKENS_PER_PROGRAM,
            ALIGNMENT=self._alignment,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _host_rows_kernel(
    bases,  # [L] int64: address of each layer's row 0
    slots,  # [k] int64
    rows,  # [k, L, row_words] int32
    num_tokens,
    row_words,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every row of a layer and of `rows`
    GATHER: tl.constexpr,  # from the layers to `rows`; else back
):
    layer, num_layers = tl.program_id(1), tl.num_programs(1)
    base = tl.multiple_of(tl.load(bases + layer).to(tl.pointer_type(tl.int32)), ALIGNMENT)
    for i in tl.static_range(TOKENS):
        token = tl.program_id(0) * TOKENS + i
        exists = token < num_tokens
        own = base + tl.load(slots + token, mask=exists, other=0) * row_words
        row = rows + (token * num_layers + layer).to(tl.int64) * row_words
        for start in range(0, row_words, WORDS):
            word = start + tl.arange(0, WORDS)
            mask = word < tl.where(exists, row_words, 0)
            if GATHER:
                tl.store(row + word, tl.load(own + word, mask=mask), mask=mask)
            else:
                tl.store(own + word, tl.load(row + word, mask=mask), mask=mask)


class TritonHostRows(SlotRows):
    """Gathers slots into rows that have all layers of a token, and scatters them back."""

    def gather(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy `slots` [k] int64 of every layer to `rows` [k, L, row], in one launch."""
        self._run(slots, rows, gather=True)

    def scatter(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy `rows` [k, L, row] to `slots` [k] int64 of every layer, in one launch."""
        self._run(slots, rows, gather=False)

    def _run(self, slots: torch.Tensor, rows: torch.Tensor, *, gather: bool) -> None:
        _host_rows_kernel[self._grid(len(slots))](
            self._bases,
            slots,
            rows.view(torch.int32),
            len(slots),
            self._row_words,
            WORDS=self._words,
            TOKENS=TOKENS_PER_PROGRAM,
            ALIGNMENT=self._alignment,
            GATHER=gather,
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
