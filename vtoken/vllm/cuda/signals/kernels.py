"""Triton kernels of signals: what a step adds to accumulators, and what the report reads.

    probe      saved queries, keys of the cache ─► `probe_kernels` ─► `accumulate`
    report     accumulators ─► `read_accumulators` ─┐
               keys of the cache ─► `read_keys` ────┴─► `pool` ─► outbox

A launch is for all requests of one signal, which are the columns of a `Table`; its programs are
independent. Lengths, widths and counts vary from step to step, so no kernel is compiled for their
values.

Imported only if Triton is used. `docs/gpu.md` says what has run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vtoken.policies.signals import Signal
from vtoken.vllm.cuda.signals.tables import (
    Additions,
    KeyReadings,
    Readings,
    Table,
    padded,
)

TILE = 64  # tokens of one program


@triton.jit(do_not_specialize=["num_entries", "values_row", "part_row", "num_rows"])
def _accumulate_kernel(
    rows,  # [P, R, width] float32 by strides: attention, by layer where `FOLD`
    entries,  # [8, n], see `Additions`
    bases,  # [3, n] int64: addresses of the accumulators before and now, and of `of_dead`
    kept,  # where the tokens that stay were, of requests whose columns change
    num_entries,
    values_row,
    part_row,
    num_rows,  # of an accumulator
    PARTS: tl.constexpr,
    FOLD_MAX: tl.constexpr,
    SUMS: tl.constexpr,  # add to the only row; else write the row of this query
    COUNTS: tl.constexpr,  # write whether it is at least the mean, as bytes
    TILE: tl.constexpr,
):
    i, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(entries + i)
    capacity = tl.load(entries + 6 * num_entries + i)
    source = tl.load(bases + i)
    target = tl.load(bases + num_entries + i)
    end = length
    if source != target:  # a new accumulator, whose other columns are zero
        end = capacity
    if SUMS:
        of_dead = tl.load(bases + 2 * num_entries + i).to(tl.pointer_type(tl.float32))
        num_dead = tl.load(entries + 7 * num_entries + i)
        if tile * TILE < num_dead:
            died = tl.load(entries + 2 * num_entries + i) + tl.load(entries + 3 * num_entries + i)
            number = tile * TILE + tl.arange(0, TILE)
            dead = number < num_dead
            column = tl.load(kept + died + number, mask=dead, other=0)
            token = tl.load(kept + died + num_dead + number, mask=dead, other=0)
            last = tl.load(source.to(tl.pointer_type(tl.float32)) + column, mask=dead, other=0.0)
            tl.store(of_dead + token, last, mask=dead)
    if tile * TILE < end:
        row = tl.load(entries + num_entries + i).to(tl.int64)
        known = tl.load(entries + 2 * num_entries + i)
        columns = tl.load(entries + 3 * num_entries + i)
        query = tl.load(entries + 4 * num_entries + i)
        old_capacity = tl.load(entries + 5 * num_entries + i)
        at = tile * TILE + tl.arange(0, TILE)
        live = at < length
        inside = at < end
        existed = at < known
        value = tl.load(rows + row * values_row + at, mask=live, other=0.0)
        for part in tl.static_range(1, PARTS):
            own = tl.load(rows + part * part_row + row * values_row + at, mask=live, other=0.0)
            value = tl.maximum(value, own) if FOLD_MAX else value + own
        if PARTS > 1 and not FOLD_MAX:
            value = value / PARTS
        before = at
        if columns >= 0:
            before = tl.load(kept + columns + at, mask=existed, other=0)
        if COUNTS:
            old = source.to(tl.pointer_type(tl.int8))
            new = target.to(tl.pointer_type(tl.int8))
            given = (value * length.to(tl.float32) >= 1.0).to(tl.int8)
        else:
            old = source.to(tl.pointer_type(tl.float32))
            new = target.to(tl.pointer_type(tl.float32))
            given = value
        if SUMS:
            back = before < 0
            total = tl.load(old + before, mask=existed & ~back, other=0.0)
            total += tl.load(of_dead - 1 - before, mask=existed & back, other=0.0)
            tl.store(new + at, total + given, mask=inside)
        else:
            if source != target:
                for r in range(num_rows):
                    kept_row = tl.load(old + r * old_capacity + before, mask=existed, other=0)
                    if r != query:
                        tl.store(new + r * capacity + at, kept_row, mask=inside)
            tl.store(new + query * capacity + at, given, mask=inside)


@triton.jit(do_not_specialize=["num_entries", "values_row"])
def _read_kernel(
    entries,  # [4, n], see `Readings`
    bases,  # [n] int64: addresses of the accumulators
    values,  # [n, width] float32
    num_entries,
    values_row,
    BYTES: tl.constexpr,
    USE_MAX: tl.constexpr,
    MEAN: tl.constexpr,
    TILE: tl.constexpr,
):
    i, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(entries + i)
    if tile * TILE < length:
        num_rows = tl.load(entries + 2 * num_entries + i)
        capacity = tl.load(entries + 3 * num_entries + i)
        base = tl.load(bases + i)
        kept = base.to(tl.pointer_type(tl.int8 if BYTES else tl.float32))
        at = tile * TILE + tl.arange(0, TILE)
        live = at < length
        found = tl.load(kept + at, mask=live, other=0).to(tl.float32)
        for r in range(1, num_rows):
            one = tl.load(kept + r * capacity + at, mask=live, other=0).to(tl.float32)
            found = tl.maximum(found, one) if USE_MAX else found + one
        if MEAN:
            found = found / num_rows.to(tl.float32)
        tl.store(values + i.to(tl.int64) * values_row + at, found, mask=live)


@triton.jit(do_not_specialize=["num_entries"])
def _key_anchor_kernel(
    keys,  # [slots, Hkv, D] by strides
    pages,  # [rows, pages_row] int32
    entries,  # [6, n], see `KeyReadings`
    anchors,  # [rows, Hkv, D] float32 by strides: sums of keys of length 1
    num_entries,
    pages_row,
    anchor_row,
    key_slot,
    key_head,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    i, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(entries + i)
    row = pages + tl.load(entries + 2 * num_entries + i).to(tl.int64) * pages_row
    first = tl.load(entries + 3 * num_entries + i)
    exists = tl.load(entries + 5 * num_entries + i)
    dim = tl.arange(0, D_PAD)
    anchor = anchors + tl.load(entries + 4 * num_entries + i).to(tl.int64) * anchor_row
    to = anchor + head * D + dim
    total = tl.zeros((D_PAD,), tl.float32)
    if exists > 0:
        total = tl.load(to, mask=dim < D, other=0.0)
    for start in range(first, length, TILE):
        at = start + tl.arange(0, TILE)
        new = at < length
        slot = tl.load(row + at, mask=new, other=0).to(tl.int64)
        k = tl.load(
            keys + slot[:, None] * key_slot + head * key_head + dim[None, :],
            mask=new[:, None] & (dim[None, :] < D),
            other=0.0,
        ).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(k * k, axis=1)), 1e-12)
        total += tl.sum(k / norm[:, None], axis=0)
    tl.store(to, total, mask=dim < D)


@triton.jit(do_not_specialize=["num_entries", "values_row"])
def _key_score_kernel(
    keys,  # [slots, Hkv, D] by strides
    pages,  # [rows, pages_row] int32
    entries,  # [6, n], see `KeyReadings`
    anchors,  # [rows, Hkv, D] float32 by strides
    weights,  # [Hkv] float32: the share of each head; 0: not read
    values,  # [n, width] float32
    num_entries,
    pages_row,
    anchor_row,
    key_slot,
    key_head,
    values_row,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ANCHORED: tl.constexpr,  # the cosine with the anchor; else the norm
    USE_MAX: tl.constexpr,
    ADDS: tl.constexpr,  # `values` has those of other layers
    TILE: tl.constexpr,
):
    i, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(entries + i)
    if tile * TILE < length:
        row = pages + tl.load(entries + 2 * num_entries + i).to(tl.int64) * pages_row
        anchor = anchors + tl.load(entries + 4 * num_entries + i).to(tl.int64) * anchor_row
        at = tile * TILE + tl.arange(0, TILE)
        live = at < length
        slot = tl.load(row + at, mask=live, other=0).to(tl.int64)
        dim = tl.arange(0, D_PAD)
        to = values + i.to(tl.int64) * values_row + at
        found = tl.full((TILE,), float("-inf") if USE_MAX else 0.0, tl.float32)
        if ADDS:
            found = tl.load(to, mask=live, other=0.0)
        for head in range(HEADS):
            weight = tl.load(weights + head)
            if weight > 0.0:
                k = tl.load(
                    keys + slot[:, None] * key_slot + head * key_head + dim[None, :],
                    mask=live[:, None] & (dim[None, :] < D),
                    other=0.0,
                ).to(tl.float32)
                norm = tl.sqrt(tl.sum(k * k, axis=1))
                if ANCHORED:
                    mean = tl.load(anchor + head * D + dim, mask=dim < D, other=0.0)
                    mean = mean / tl.maximum(tl.sqrt(tl.sum(mean * mean, axis=0)), 1e-12)
                    x = -tl.sum(k * mean[None, :], axis=1) / tl.maximum(norm, 1e-12)
                else:
                    x = -norm
                found = tl.maximum(found, x) if USE_MAX else found + x * weight
        tl.store(to, found, mask=live)


@triton.jit(do_not_specialize=["num_entries", "values_row", "num_apart", "radius"])
def _pool_kernel(
    values,  # [n, width] float32
    entries,  # [2 or more, n]: tokens, and where they begin in `outbox`
    outbox,  # float32
    num_entries,
    values_row,
    num_apart,  # the newest tokens, which are not pooled
    radius,
    USE_MAX: tl.constexpr,
    TILE: tl.constexpr,
):
    i, tile = tl.program_id(0), tl.program_id(1)
    length = tl.load(entries + i)
    if tile * TILE < length:
        count = tl.maximum(length - num_apart, 0)
        at = tile * TILE + tl.arange(0, TILE)
        row = values + i.to(tl.int64) * values_row
        found = tl.load(row + at, mask=at < length, other=0.0)
        around = tl.full((TILE,), float("-inf") if USE_MAX else 0.0, tl.float32)
        for step in range(2 * radius + 1):
            near = at + step - radius
            exists = (near >= 0) & (near < count)
            x = tl.load(row + near, mask=exists, other=float("-inf") if USE_MAX else 0.0)
            around = tl.maximum(around, x) if USE_MAX else around + x
        if not USE_MAX:
            around = around / (2 * radius + 1).to(tl.float32)
        found = tl.where(at < count, around, found)
        tl.store(outbox + tl.load(entries + num_entries + i) + at, found, mask=at < length)


def accumulate(rows: torch.Tensor, added: Additions) -> None:
    """Add the attention of single queries, `rows` [P, R, width] float32, to accumulators."""
    entries, signal = added.entries.on_device, added.signal
    kept = added.kept.on_device if added.kept is not None else entries
    _accumulate_kernel[_grid(added.entries, added.width)](
        rows,
        entries,
        added.bases.on_device,
        kept,
        entries.shape[1],
        rows.stride(1),
        rows.stride(0),
        added.num_rows,
        PARTS=len(rows),
        FOLD_MAX=signal.over_layers == "max",
        SUMS=signal.definition.queries == "all",
        COUNTS=signal.definition.counts,
        TILE=TILE,
    )


def read_accumulators(readings: Readings) -> torch.Tensor:
    """The numbers [n, width] of accumulators before neighbours, each up to its length."""
    entries, kind = readings.entries.on_device, readings.signal.definition
    values = readings.values()
    _read_kernel[_grid(readings.entries)](
        entries,
        readings.bases.on_device,
        values,
        entries.shape[1],
        values.stride(0),
        BYTES=kind.counts,
        USE_MAX=kind.name == "attention_max",
        MEAN=kind.name == "attention_window",
        TILE=TILE,
    )
    return values


def read_keys(readings: KeyReadings, pages: torch.Tensor) -> torch.Tensor:
    """A rank's part [P, n, width] of a key signal before neighbours, each up to its length.

    Two launches a layer, one for a signal without an anchor.
    """
    signal, entries = readings.signal, readings.entries.on_device
    values = readings.values()
    num_entries, anchored = entries.shape[1], readings.anchors is not None
    for number, (keys, weights) in enumerate(zip(readings.keys, readings.weights, strict=True)):
        _, num_heads, dim = keys.shape
        padded = max(16, triton.next_power_of_2(dim))
        part = values[number if signal.parts > 1 else 0]
        anchors = readings.anchors[:, number] if readings.anchors is not None else values
        if anchored:
            _key_anchor_kernel[(num_entries, num_heads)](
                keys,
                pages,
                entries,
                anchors,
                num_entries,
                pages.stride(0),
                anchors.stride(0),
                keys.stride(0),
                keys.stride(1),
                D=dim,
                D_PAD=padded,
                TILE=TILE,
            )
        _key_score_kernel[_grid(readings.entries)](
            keys,
            pages,
            entries,
            anchors,
            weights,
            part,
            num_entries,
            pages.stride(0),
            anchors.stride(0),
            keys.stride(0),
            keys.stride(1),
            part.stride(0),
            HEADS=num_heads,
            D=dim,
            D_PAD=padded,
            ANCHORED=anchored,
            USE_MAX=signal.over_heads == "max",
            ADDS=signal.parts == 1 and number > 0,
            TILE=TILE,
        )
    return values


def pool(signal: Signal, values: torch.Tensor, table: Table, outbox: torch.Tensor) -> None:
    """Write `values` [n, width], each aggregated with its neighbours, into `outbox`."""
    entries = table.on_device
    _pool_kernel[_grid(table)](
        values,
        entries,
        outbox,
        entries.shape[1],
        values.stride(0),
        max(signal.window_queries, 1),
        signal.pool_radius,
        USE_MAX=signal.pool == "max",
        TILE=TILE,
    )


def _grid(table: Table, width: int = 0) -> tuple[int, int]:
    return table.host.shape[1], triton.cdiv(width or padded(table), TILE)
