"""The token tables of all requests as columns: one row per request, one array per fact.

Facts with one number per request are fields of `facts`, by row. Facts with one number per token,
place or block are segments of arenas, because request lengths differ by orders of magnitude:

    index_of, parked_at[first_token + id]    id: any token the request ever had
    naive_live[first_token / S + k]  k: naive block, the tokens with ids k * S .. (k + 1) * S - 1
    token_at[(first_block + gap) * S + p]    p: physical index, a place in the request's block table
    block_id, block_live, readonly[first_block + gap + i]      i: logical block

    gap + num_blocks <= block_capacity    gap: blocks that have left at the front of the segment

A row's capacity grows by at least an eighth; a gap of an eighth is closed instead. Memory: 8 bytes
per token ever computed, 4 per place and 9 per block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.base.arena import GROWTH, Arena, Column
from vtoken.base.arrays import Bools, Ints
from vtoken.base.rows import Rows
from vtoken.core.tables import kernels

Int32s = npt.NDArray[np.int32]
MIN_GROWTH_BLOCKS = 8


class TableArrays(NamedTuple):
    """The arrays of `Columns`, for kernels; `facts`: one record per row."""

    facts: Any
    index_of: Int32s
    parked_at: Int32s  # the host slot of its copy; -1: none
    naive_live: Int32s
    token_at: Int32s
    block_id: Int32s
    block_live: Int32s
    readonly: Bools


class Columns(Rows):
    """The arrays. This class allocates rows and capacity; the kernels own the contents."""

    num_tokens: Ints  # T, dead ones included
    num_live: Ints
    extent: Ints  # E
    num_blocks: Ints
    num_full: Ints  # blocks full of live tokens
    num_dead_slots: Ints  # dead tokens whose slot is held and not overwritten
    num_copies: Ints  # tokens with a copy in host memory
    num_parked: Ints  # of these, dead
    num_restored: Ints  # tokens that became live again, counted each time
    num_naive: Ints  # naive blocks with a live token: what naive eviction would hold
    front: Ints  # every place below is live
    hole: Ints  # place of the next single token; -1: behind the last one
    num_recycled: Ints  # tokens written into a hole
    virtual: Ints  # 1: the layout is no longer the identity
    number: Ints  # identifies the request in `pool.owner`; 0: none assigned
    first_token: Ints
    token_capacity: Ints
    first_block: Ints
    gap: Ints  # blocks between `first_block` and the first one that is held
    block_capacity: Ints

    def __init__(self, block_size: int) -> None:
        s, i4 = block_size, np.int32
        self.block_size = block_size
        self._tokens = Arena(Column(i4, fill=-1), Column(i4, fill=-1), Column(i4, group=s))
        self._blocks = Arena(Column(i4, fill=-1, width=s), Column(i4), Column(i4), Column(np.bool_))
        super().__init__()

    def _set(self, facts: npt.NDArray[Any]) -> None:
        super()._set(facts)
        self._set_arrays()

    def _set_arrays(self) -> None:
        self.arrays = TableArrays(self.records, *self._tokens.arrays, *self._blocks.arrays)

    def take_row(self, number: int) -> int:
        """Allocate a row without tokens and blocks."""
        row = self.take()
        self.hole[row] = -1
        self.number[row] = number
        return row

    def reserve(self, row: int, num_tokens: int, num_blocks: int) -> None:
        """Ensure capacity for this many tokens and blocks of `row`."""
        s = self.block_size
        token_capacity = int(self.token_capacity[row])
        block_capacity = int(self.block_capacity[row])
        if num_tokens > token_capacity:
            used = -(-int(self.num_tokens[row]) // s) * s
            wanted = _capacity(-(-num_tokens // s), token_capacity // s) * s
            self._tokens.reserve(self.first_token, self.token_capacity, row, used, wanted)
            self._set_arrays()
        used = int(self.gap[row] + self.num_blocks[row])
        more = num_blocks - int(self.num_blocks[row])
        if used + more > block_capacity and GROWTH * int(self.gap[row]) >= block_capacity:
            kernels.close_gap(row, s, self.arrays)
            used = int(self.num_blocks[row])
        if used + more > block_capacity:
            wanted = _capacity(used + more, block_capacity)
            self._blocks.reserve(self.first_block, self.block_capacity, row, used, wanted)
            self._set_arrays()


def _capacity(needed: int, current: int) -> int:
    return max(needed + MIN_GROWTH_BLOCKS, current + current // GROWTH)
