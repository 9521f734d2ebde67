"""The token tables of all requests as columns: one row a request, one array a fact.

Facts with one number a request are the fields of `facts`, by row. Facts with a number a token, a
place or a block are slices of arenas, because requests differ in length by orders of magnitude:

    index[first_token + id]         id >= 0, in the tokens that the request ever had
    born_live[first_token / S + k]  k-th S tokens by id
    token_at[first_block * S + p]   p, a physical index: a place in the request's block table
    block_id, block_live, readonly[first_block + i]      i, a logical block

A row's room grows by an eighth at least, and moves to the end of its arena then; what it leaves
behind is taken back when the arena is full. Costs 4 bytes a token ever, 4 a place, and 9 a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
GROWTH = 8  # room grows by 1 / GROWTH
ROOM_BLOCKS = 8  # and by this many blocks at least


class Columns:
    """The arrays. Rows and room are handed out here; what they hold is the kernels' business."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._free_rows: list[int] = []
        self.num_rows = 0  # that were ever given
        self._num_tokens_given = 0
        self._num_blocks_given = 0
        self._set_facts(np.zeros(8, dtype=FACTS))
        self.index: Int32s = np.empty(0, dtype=np.int32)
        self.born_live: Int32s = np.empty(0, dtype=np.int32)
        self.token_at: Int32s = np.empty(0, dtype=np.int32)
        self.block_id: Int32s = np.empty(0, dtype=np.int32)
        self.block_live: Int32s = np.empty(0, dtype=np.int32)
        self.readonly: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

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
        arrays = (self.index, self.born_live, self.token_at, self.block_id, self.block_live)
        return sum(array.nbytes for array in (*arrays, self.readonly, self.facts))

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
            self._reserve_tokens(row, _room(-(-num_tokens // s), token_room // s) * s)
        if num_blocks > block_room:
            self._reserve_blocks(row, _room(num_blocks, block_room))

    def _reserve_tokens(self, row: int, room: int) -> None:
        start = self._num_tokens_given
        if start + room > len(self.index):
            start = self._repack_tokens(room)
        first, known = int(self.first_token[row]), int(self.num_tokens[row])
        self.index[start : start + known] = self.index[first : first + known]
        self.index[start + known : start + room] = -1
        s = self.block_size
        born = self.born_live[first // s : first // s - (-known // s)].copy()
        self.born_live[start // s : (start + room) // s] = 0
        self.born_live[start // s : start // s + len(born)] = born
        self.first_token[row] = start
        self.token_room[row] = room
        self._num_tokens_given = start + room

    def _repack_tokens(self, more: int) -> int:
        """Room for `more` behind all rows: what they left behind is taken back."""
        s = self.block_size
        total = int(self.token_room.sum()) + more
        size = max(total + total // GROWTH // s * s, len(self.index))
        index, born = np.full(size, -1, np.int32), np.zeros(size // s, np.int32)
        start = 0
        for row in np.flatnonzero(self.token_room).tolist():
            first, room = int(self.first_token[row]), int(self.token_room[row])
            index[start : start + room] = self.index[first : first + room]
            ends = (first + room) // s, (start + room) // s
            born[start // s : ends[1]] = self.born_live[first // s : ends[0]]
            self.first_token[row] = start
            start += room
        self.index, self.born_live = index, born
        return start

    def _reserve_blocks(self, row: int, room: int) -> None:
        start = self._num_blocks_given
        if start + room > len(self.block_id):
            start = self._repack_blocks(room)
        first, known = int(self.first_block[row]), int(self.num_blocks[row])
        s, end = self.block_size, start + room
        for array in (self.block_id, self.block_live, self.readonly):
            array[start : start + known] = array[first : first + known]
            array[start + known : end] = 0
        self.token_at[start * s : (start + known) * s] = self.token_at[
            first * s : (first + known) * s
        ]
        self.token_at[(start + known) * s : end * s] = -1
        self.first_block[row] = start
        self.block_room[row] = room
        self._num_blocks_given = end

    def _repack_blocks(self, more: int) -> int:
        s = self.block_size
        total = int(self.block_room.sum()) + more
        size = max(total + total // GROWTH, len(self.block_id))
        old = (self.block_id, self.block_live, self.readonly, self.token_at.reshape(-1, s))
        new = (
            np.zeros(size, np.int32),
            np.zeros(size, np.int32),
            np.zeros(size, np.bool_),
            np.full((size, s), -1, np.int32),
        )
        start = 0
        for row in np.flatnonzero(self.block_room).tolist():
            first, room = int(self.first_block[row]), int(self.block_room[row])
            for before, after in zip(old, new, strict=True):
                after[start : start + room] = before[first : first + room]
            self.first_block[row] = start
            start += room
        self.block_id, self.block_live, self.readonly = new[:3]
        self.token_at = new[3].reshape(-1)
        return start


def _room(needed: int, had: int) -> int:
    return max(needed + ROOM_BLOCKS, had + had // GROWTH)
