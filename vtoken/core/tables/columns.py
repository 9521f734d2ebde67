"""The token tables of all requests as columns: one row per request, one array per fact.

Facts with one number per request are fields of `facts`, by row. Facts with one number per token,
place or block are segments of arenas, because request lengths differ by orders of magnitude:

    index[first_token + id]          id: any token the request ever had
    naive_live[first_token / S + k]  k: naive block, the tokens with ids k * S .. (k + 1) * S - 1
    token_at[(first_block + gap) * S + p]    p: physical index, a place in the request's block table
    block_id, block_live, readonly[first_block + gap + i]      i: logical block

    gap + num_blocks <= block_capacity    gap: blocks that have left at the front of the segment

A row's capacity grows by at least an eighth; a gap of an eighth is closed instead. Memory: 4 bytes
per token ever computed, 4 per place and 9 per block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.base.arena import GROWTH, Arena, Column
from vtoken.core.tables import kernels

Int32s = npt.NDArray[np.int32]
ROW_FACTS = np.dtype(
    [
        ("num_tokens", np.int64),  # T, dead ones included
        ("num_live", np.int64),
        ("extent", np.int64),  # E
        ("num_blocks", np.int64),
        ("num_full", np.int64),  # blocks full of live tokens
        ("num_dead_slots", np.int64),  # dead tokens whose slot is held and not overwritten
        ("num_naive", np.int64),  # naive blocks with a live token: what naive eviction would hold
        ("front", np.int64),  # every place below is live
        ("hole", np.int64),  # place of the next single token; -1: behind the last one
        ("num_recycled", np.int64),  # tokens written into a hole
        ("virtual", np.int64),  # 1: the layout is no longer the identity
        ("number", np.int64),  # identifies the request in `pool.owner`; 0: none assigned
        ("first_token", np.int64),
        ("token_capacity", np.int64),
        ("first_block", np.int64),
        ("gap", np.int64),  # blocks between `first_block` and the first one that is held
        ("block_capacity", np.int64),
    ],
    align=True,
)
MIN_GROWTH_BLOCKS = 8


class Columns:
    """The arrays. This class allocates rows and capacity; the kernels own the contents."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._free_rows: list[int] = []
        self.num_rows = 0  # ever allocated
        self._set_facts(np.zeros(8, dtype=ROW_FACTS))
        s, i4 = block_size, np.int32
        self._tokens = Arena(Column(i4, fill=-1), Column(i4, group=s))
        self._blocks = Arena(Column(i4, fill=-1, width=s), Column(i4), Column(i4), Column(np.bool_))
        self._set_arrays()

    def _set_arrays(self) -> None:
        self.index: Int32s
        self.naive_live: Int32s
        self.index, self.naive_live = self._tokens.arrays
        self.token_at: Int32s
        self.block_id: Int32s
        self.block_live: Int32s
        self.readonly: npt.NDArray[np.bool_]
        self.token_at, self.block_id, self.block_live, self.readonly = self._blocks.arrays

    def _set_facts(self, facts: npt.NDArray[Any]) -> None:
        self.facts = facts
        self.records = facts.view(np.recarray)  # the same memory, for kernels
        self.num_tokens = facts["num_tokens"]
        self.num_live = facts["num_live"]
        self.extent = facts["extent"]
        self.num_blocks = facts["num_blocks"]
        self.num_full = facts["num_full"]
        self.virtual = facts["virtual"]
        self.hole = facts["hole"]
        self.number = facts["number"]
        self.first_token = facts["first_token"]
        self.first_block = facts["first_block"]
        self.gap = facts["gap"]
        self.token_capacity = facts["token_capacity"]
        self.block_capacity = facts["block_capacity"]

    def take_row(self, number: int) -> int:
        """Allocate a row without tokens and blocks."""
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self.num_rows
            self.num_rows += 1
            if row == len(self.facts):
                grown = np.zeros(2 * row, dtype=ROW_FACTS)
                grown[:row] = self.facts
                self._set_facts(grown)
        self.facts[row] = 0
        self.hole[row] = -1
        self.number[row] = number
        return row

    def give_back_row(self, row: int) -> None:
        self.facts[row] = 0
        self.hole[row] = -1
        self._free_rows.append(row)

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
            kernels.close_gap(
                row, s, self.records, self.index, self.token_at,
                self.block_id, self.block_live, self.readonly,
            )  # fmt: skip
            used = int(self.num_blocks[row])
        if used + more > block_capacity:
            wanted = _capacity(used + more, block_capacity)
            self._blocks.reserve(self.first_block, self.block_capacity, row, used, wanted)
            self._set_arrays()


def _capacity(needed: int, current: int) -> int:
    return max(needed + MIN_GROWTH_BLOCKS, current + current // GROWTH)
