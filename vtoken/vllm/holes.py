"""Exact attention over requests with holes, with the stock kernel: their live tokens are packed,
layer by layer, into scratch blocks, and the kernel reads those.

A block that is full is copied whole; the tokens of the others are gathered one by one. The packed
order is: full blocks, then the remaining tokens by id, this step's
new tokens last. Attention over a cache is a sum over slots and positions are already in K, so the
order is free, except that a chunk's own tokens must come last, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vtoken.pool import Slots
from vtoken.vllm.layout import KVLayout


@dataclass(frozen=True, slots=True)
class HoleyRequest:
    """`batch_index`: row of the batch. `slots` [n]: live slots by id, `num_new` of them new."""

    batch_index: int
    slots: Slots
    num_new: int


@dataclass(slots=True)
class Packing:
    """What to copy where, the same for every layer.

    Whole blocks `full_from` [f] -> `full_to` [f]; tokens (block, offset) -> (block, offset) [t].
    `block_table` [R, m] int32 and `seq_lens` [R] int32 describe the scratch blocks.
    """

    full_from: torch.Tensor
    full_to: torch.Tensor
    from_block: torch.Tensor
    from_offset: torch.Tensor
    to_block: torch.Tensor
    to_offset: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_blocks: int

    def fill(self, cache: torch.Tensor, scratch: torch.Tensor, layout: KVLayout) -> None:
        """Pack the live tokens of `cache` [N, H, S, 2D] into `scratch` [num_blocks, H, S, 2D]."""
        if len(self.full_from):
            scratch[self.full_to] = cache[self.full_from]
        if len(self.from_block):
            key, value = layout.views(cache)
            packed_key, packed_value = layout.views(scratch)
            packed_key[self.to_block, self.to_offset] = key[self.from_block, self.from_offset]
            packed_value[self.to_block, self.to_offset] = value[self.from_block, self.from_offset]


def plan_packing(requests: list[HoleyRequest], block_size: int) -> Packing:
    """The packing of all holey requests of one step."""
    full_from: list[np.ndarray] = []
    full_to: list[np.ndarray] = []
    token_from: list[np.ndarray] = []
    token_to: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    next_block = 0
    for request in requests:
        n = len(request.slots)
        old = request.slots[: n - request.num_new]
        blocks, counts = np.unique(old // block_size, return_counts=True)
        full = blocks[counts == block_size]
        loose = old[~np.isin(old // block_size, full)]
        loose = np.concatenate([loose, request.slots[n - request.num_new :]])
        num_blocks = len(full) + -(-len(loose) // block_size)
        row = np.arange(next_block, next_block + num_blocks, dtype=np.int64)
        full_from.append(full)
        full_to.append(row[: len(full)])
        token_from.append(loose)
        token_to.append(
            row[len(full)] * block_size + np.arange(len(loose)) if len(loose) else loose
        )
        rows.append(row)
        next_block += num_blocks
    source = torch.from_numpy(np.concatenate(token_from))
    target = torch.from_numpy(np.concatenate(token_to))
    table = torch.zeros((len(rows), max(len(row) for row in rows)), dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.from_numpy(row)
    return Packing(
        full_from=torch.from_numpy(np.concatenate(full_from)),
        full_to=torch.from_numpy(np.concatenate(full_to)),
        from_block=source // block_size,
        from_offset=source % block_size,
        to_block=target // block_size,
        to_offset=target % block_size,
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
