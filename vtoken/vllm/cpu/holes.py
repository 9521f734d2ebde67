"""Exact attention over requests with holes, with the stock kernel: the loose tokens are packed.

A token is loose when its block is not full of live tokens. Attention over a cache is a sum over
slots, and positions are already in K, so the order of what is read is free. Two ways, layer by
layer:

- *lent*: free blocks of the pool, lent for this step, take the loose tokens; the kernel reads the
  full blocks where they lie, and the lent ones behind them. One kernel call for the whole batch.
- *apart*: when too few blocks are free, the request's full blocks are copied and its loose tokens
  packed into scratch blocks outside the pool, and the kernel reads those in a call of its own.
  A chunk of several new tokens goes this way too, its own tokens last and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.arrays import Ints
from vtoken.vllm.cpu.layout import KVLayout


@dataclass(frozen=True, slots=True)
class HoleyRequest:
    """To be read apart. `batch_index`: row of the batch. `slots` [n]: live slots by id, `num_new`
    of them new.
    """

    batch_index: int
    slots: Ints
    num_new: int


@dataclass(frozen=True, slots=True)
class LentRequest:
    """`full_blocks` [f] are read as they lie, `loose_slots` [l] are packed into `lent` blocks."""

    batch_index: int
    full_blocks: Ints
    loose_slots: Ints
    lent: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenMoves:
    """Loose tokens and where they are packed, as (block, offset) pairs [t]."""

    from_block: torch.Tensor
    from_offset: torch.Tensor
    to_block: torch.Tensor
    to_offset: torch.Tensor

    @classmethod
    def of(cls, source: list[Ints], target: list[Ints], block_size: int) -> TokenMoves:
        a = torch.from_numpy(np.concatenate(source))
        b = torch.from_numpy(np.concatenate(target))
        return cls(a // block_size, a % block_size, b // block_size, b % block_size)

    def copy(self, cache: torch.Tensor, packed: torch.Tensor, layout: KVLayout) -> None:
        """Copy K and V from `cache` to `packed`, both [N, H, S, 2D]."""
        key, value = layout.views(cache)
        packed_key, packed_value = layout.views(packed)
        packed_key[self.to_block, self.to_offset] = key[self.from_block, self.from_offset]
        packed_value[self.to_block, self.to_offset] = value[self.from_block, self.from_offset]


@dataclass(frozen=True, slots=True)
class Lent:
    """Packing into blocks of the pool; `rows` are (batch index, block table) of the requests."""

    moves: TokenMoves
    rows: list[tuple[int, torch.Tensor]]

    def fill(self, cache: torch.Tensor, layout: KVLayout) -> None:
        self.moves.copy(cache, cache, layout)

    def rewrite(self, block_table: torch.Tensor) -> torch.Tensor:
        """`block_table` [R, m] with the requests' rows replaced; the given one is left alone."""
        table = block_table.clone()
        for index, row in self.rows:
            table[index, : len(row)] = row
        return table


@dataclass(frozen=True, slots=True)
class Apart:
    """Packing into `num_blocks` scratch blocks, read through `block_table` [R, m] int32.

    Whole blocks `full_from` [f] -> `full_to` [f], then `moves`; `seq_lens` [R] int32.
    """

    full_from: torch.Tensor
    full_to: torch.Tensor
    moves: TokenMoves
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_blocks: int

    def fill(self, cache: torch.Tensor, scratch: torch.Tensor, layout: KVLayout) -> None:
        if len(self.full_from):
            scratch[self.full_to] = cache[self.full_from]
        self.moves.copy(cache, scratch, layout)


def split_loose(slots: Ints, num_new: int, block_size: int) -> tuple[Ints, Ints]:
    """Full blocks, and the slots of loose tokens; of several new tokens all are loose and last."""
    n = len(slots) if num_new == 1 else len(slots) - num_new
    blocks, counts = np.unique(slots[:n] // block_size, return_counts=True)
    full = blocks[counts == block_size]
    loose = slots[:n][~np.isin(slots[:n] // block_size, full)]
    return full, np.concatenate([loose, slots[n:]])


def plan_lent(requests: list[LentRequest], block_size: int) -> Lent:
    """The packing of requests that were lent blocks; ValueError when those are too few."""
    source, target, rows = [], [], []
    for request in requests:
        loose, lent = request.loose_slots, np.asarray(request.lent, dtype=np.int64)
        if len(loose) > len(lent) * block_size:
            raise ValueError(f"{len(loose)} loose tokens do not fit {len(lent)} lent blocks")
        place = np.arange(len(loose))
        source.append(loose)
        target.append(lent[place // block_size] * block_size + place % block_size)
        row = np.concatenate([request.full_blocks, lent]).astype(np.int32)
        rows.append((request.batch_index, torch.from_numpy(row)))
    return Lent(TokenMoves.of(source, target, block_size), rows)


def plan_apart(requests: list[HoleyRequest], block_size: int) -> Apart:
    """The packing of requests that are read apart from the pool."""
    full_from, full_to, source, target, rows = [], [], [], [], []
    next_block = 0
    for request in requests:
        full, loose = split_loose(request.slots, request.num_new, block_size)
        end = next_block + len(full) + -(-len(loose) // block_size)
        row = np.arange(next_block, end, dtype=np.int64)
        full_from.append(full)
        full_to.append(row[: len(full)])
        source.append(loose)
        target.append((next_block + len(full)) * block_size + np.arange(len(loose)))
        rows.append(row)
        next_block = end
    table = torch.zeros((len(rows), max(len(row) for row in rows)), dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.from_numpy(row)
    return Apart(
        full_from=torch.from_numpy(np.concatenate(full_from)),
        full_to=torch.from_numpy(np.concatenate(full_to)),
        moves=TokenMoves.of(source, target, block_size),
        block_table=table,
        seq_lens=torch.tensor([len(r.slots) for r in requests], dtype=torch.int32),
        num_blocks=next_block,
    )


class Scratch:
    """The scratch blocks of one worker, grown on demand, shared by all layers of one shape."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def blocks(self, num_blocks: int, cache: torch.Tensor) -> torch.Tensor:
        """At least `num_blocks` blocks shaped and typed like those of `cache`, zeroed when new."""
        have = self._tensor
        shape = cache.shape[1:]
        if (
            have is None
            or len(have) < num_blocks
            or have.shape[1:] != shape
            or have.dtype != cache.dtype
        ):
            size = max(num_blocks, 2 * len(have) if have is not None else 0)
            self._tensor = have = torch.zeros((size, *shape), dtype=cache.dtype)
        return have
