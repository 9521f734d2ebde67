"""The token tables of all requests as columns: one row a request, one array a fact.

Facts with one number a request are the fields of `facts`, by row. Facts with a number a token, a
place or a block are slices of arenas, because requests differ in length by orders of magnitude:

    index[first_token + id]         id >= 0, in the tokens that the request ever had
    born_live[first_token / S + k]  k-th S tokens by id
    token_at[first_block * S + p]   p, a physical index: a place in the request's block table
    block_id, block_live, readonly[first_block + i]      i, a logical block

A row's room grows by an eighth at least. Costs 4 bytes a token ever, 4 a place, and 9 a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.arena import GROWTH, Arena, Column

Int32s = npt.NDArray[np.int32]
FACTS = np.dtype(
    [
        ("num_tokens", np.int64),  # T, dead ones included
        ("num_live", np.int64),
        ("extent", np.int64),  # E
        ("num_blocks", np.int64),
        ("num_full", np.int64),  # blocks full of live tokens
        ("num_ghosts", np.int64),  # dead tokens whose slot is held and was not written since
        ("num_born", np.int64),  # positional blocks with a live token: what naive eviction holds
        ("front", np.int64),  # no hole below this place
        ("hole", np.int64),  # where the next single token goes; -1: behind the last one
        ("num_recycled", np.int64),  # tokens that went into a hole
        ("virtual", np.int64),  # 1: left the identity layout
        ("number", np.int64),  # stands for the request in `pool.owner`; 0: unnamed
        ("first_token", np.int64),
        ("token_room", np.int64),
        ("first_block", np.int64),
        ("block_room", np.int64),
    ],
    align=True,
)
ROOM_BLOCKS = 8  # by which room grows at least


class Columns:
    """The arrays. Rows and room are handed out here; what they hold is the kernels' business."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._free_rows: list[int] = []
        self.num_rows = 0  # that were ever given
        self._set_facts(np.zeros(8, dtype=FACTS))
        s, i4 = block_size, np.int32
        self._tokens = Arena(Column(i4, fill=-1), Column(i4, share=s))
        self._blocks = Arena(Column(i4, fill=-1, width=s), Column(i4), Column(i4), Column(np.bool_))
        self._set_arrays()

    def _set_arrays(self) -> None:
        self.index: Int32s
        self.born_live: Int32s
        self.index, self.born_live = self._tokens.arrays
        self.token_at: Int32s
        self.block_id: Int32s
        self.block_live: Int32s
        self.readonly: npt.NDArray[np.bool_]
        self.token_at, self.block_id, self.block_live, self.readonly = self._blocks.arrays

    def _set_facts(self, facts: npt.NDArray[Any]) -> None:
        self.facts = facts
        self.records = facts.view(np.recarray)  # the same memory, as kernels take it
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
        self.token_room = facts["token_room"]
        self.block_room = facts["block_room"]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, room that is not used included."""
        return self._tokens.num_bytes + self._blocks.num_bytes + self.facts.nbytes

    def take_row(self, number: int) -> int:
        """A row without tokens and blocks."""
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self.num_rows
            self.num_rows += 1
            if row == len(self.facts):
                grown = np.zeros(2 * row, dtype=FACTS)
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
        """Make room for so many tokens and blocks of `row`."""
        s = self.block_size
        token_room, block_room = int(self.token_room[row]), int(self.block_room[row])
        if num_tokens > token_room:
            used = -(-int(self.num_tokens[row]) // s) * s
            wanted = _room(-(-num_tokens // s), token_room // s) * s
            self._tokens.reserve(self.first_token, self.token_room, row, used, wanted)
        if num_blocks > block_room:
            used, wanted = int(self.num_blocks[row]), _room(num_blocks, block_room)
            self._blocks.reserve(self.first_block, self.block_room, row, used, wanted)
        self._set_arrays()


def _room(needed: int, had: int) -> int:
    return max(needed + ROOM_BLOCKS, had + had // GROWTH)
