"""The token table of one request: a view of its row in `vtoken.core.tables.columns`.

Token ids are RoPE positions. A physical index p is a place in the request's block table: block
`blocks[p // S]`, offset `p % S`. Until the first eviction the layout is the identity: p = id. Only
`TokenTables` changes tables.

Invariants (`check`), recomputed from the arrays `index_of`, here without the gap, and `token_at`:
1. token_at[index_of[id]] = id for a live id, -2 - id for a dead one whose slot is still held, and
   no other place contains an id; so no two live tokens share a place
2. num_live = |live ids|, and every count per block, naive block and request is correct
3. E = 1 + the highest place of a live token (0 when none),  E <= S * num_blocks
4. dense  <=>  E = num_live: live tokens fill the front of the block table
5. identity layout  =>  T = num_live = E, and index_of[id] = id
6. gap + num_blocks <= block_capacity
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.base.errors import InvariantViolation
from vtoken.core.tables.columns import Columns, Int32s

NONE = -1  # in `index_of`: the token has no slot; in `token_at`: nothing written


class TokenTable:
    """Placement and liveness of one request's tokens; invalid once the request is released."""

    __slots__ = ("_columns", "request_id", "row")

    def __init__(self, request_id: str, columns: Columns, row: int) -> None:
        self.request_id = request_id
        self.row = row
        self._columns = columns

    # ------------------------------------------------------------ counts

    @property
    def block_size(self) -> int:
        return self._columns.block_size

    @property
    def num_tokens(self) -> int:
        """All tokens of the request, dead ones included."""
        return int(self._columns.num_tokens[self.row])

    @property
    def num_live(self) -> int:
        return int(self._columns.num_live[self.row])

    @property
    def num_dead(self) -> int:
        return self.num_tokens - self.num_live

    @property
    def num_parked(self) -> int:
        """Dead tokens with a copy in host memory."""
        return int(self._columns.num_parked[self.row])

    @property
    def num_restored(self) -> int:
        """How often a token came back."""
        return int(self._columns.num_restored[self.row])

    @property
    def live_changes(self) -> int:
        """How often a token died or came back. With the number of tokens it identifies the set of
        live ones.
        """
        return self.num_dead + 2 * self.num_restored

    @property
    def extent(self) -> int:
        """1 + the highest place of a live token."""
        return int(self._columns.extent[self.row])

    @property
    def num_blocks(self) -> int:
        return int(self._columns.num_blocks[self.row])

    @property
    def virtual(self) -> bool:
        """Whether the layout is no longer the identity."""
        return bool(self._columns.virtual[self.row])

    @property
    def dense(self) -> bool:
        return self.extent == self.num_live

    @property
    def number(self) -> int:
        """Identifies the request in `pool.owner`; 0: none assigned."""
        return int(self._columns.number[self.row])

    # ------------------------------------------------------------ by token

    @property
    def _index(self) -> Int32s:
        first = int(self._columns.first_token[self.row])
        return self._columns.arrays.index_of[first : first + self.num_tokens]

    def live_ids(self) -> Ints:
        """Ids of the live tokens [num_live], ascending."""
        return np.flatnonzero(self._index >= 0)

    def is_live(self, token_id: int) -> bool:
        return token_id < self.num_tokens and bool(self._index[token_id] >= 0)

    def hosts_of(self, ids: Ints | slice = slice(None)) -> Ints:
        """Host slots [n] of the copies of the tokens `ids` [n], or of all; -1: none."""
        first = int(self._columns.first_token[self.row])
        hosts = self._columns.arrays.parked_at[first : first + self.num_tokens]
        return hosts[ids].astype(np.int64)

    def parked_ids(self) -> Ints:
        """Ids of the dead tokens that have a copy [num_parked], ascending."""
        return np.flatnonzero((self.hosts_of() >= 0) & (self._index < 0))

    def slots_of(self, ids: Ints) -> Ints:
        """Slots [n] of the tokens `ids` [n]; -1 where a dead token has no slot."""
        places = self._places(ids)
        ranks, offsets = np.divmod(places, self.block_size)
        if self.num_blocks == 0:
            return np.full(len(ids), -1, dtype=np.int64)
        slots: Ints = self.block_ids()[ranks] * self.block_size + offsets
        return np.where(places >= 0, slots, -1)

    def _places(self, ids: Ints | slice) -> Ints:
        """Places [n] of the tokens `ids`, dead ones included; -1: no slot."""
        index = self._index[ids].astype(np.int64)
        gap = int(self._columns.gap[self.row]) * self.block_size
        return np.where(index == NONE, NONE, np.where(index < NONE, -2 - index, index) - gap)

    # ------------------------------------------------------------ by block and place

    @property
    def _first_block(self) -> int:
        """The index of its first block in the arrays of blocks."""
        return int(self._columns.first_block[self.row] + self._columns.gap[self.row])

    def _of_blocks(self, array: Int32s) -> Int32s:
        first = self._first_block
        return array[first : first + self.num_blocks]

    @property
    def _token_at(self) -> Int32s:
        """By place [num_blocks * S]."""
        s = self.block_size
        first = self._first_block * s
        return self._columns.arrays.token_at[first : first + self.num_blocks * s]

    @property
    def blocks(self) -> list[int]:
        """The block table."""
        out: list[int] = self._of_blocks(self._columns.arrays.block_id).tolist()
        return out

    def block_ids(self) -> Ints:
        """`blocks` as an array [num_blocks]."""
        return self._of_blocks(self._columns.arrays.block_id).astype(np.int64)

    def block_live(self) -> Ints:
        """Live tokens of this request in each block of its table [num_blocks]."""
        return self._of_blocks(self._columns.arrays.block_live).astype(np.int64)

    @property
    def readonly(self) -> Bools:
        """Blocks [num_blocks] that were shared or hashed at the first eviction."""
        first = self._first_block
        return self._columns.arrays.readonly[first : first + self.num_blocks]

    def protect(self, blocks: Iterable[int]) -> None:
        """Make exactly these of its blocks read-only."""
        self.readonly[:] = np.isin(self.block_ids(), list(blocks))

    def grid(self) -> Ints:
        """Live token ids by place, [num_blocks, S]; -1 elsewhere."""
        ids = np.maximum(self._token_at, -1).astype(np.int64)
        return ids.reshape(-1, self.block_size)

    def written_ids(self) -> Ints:
        """The last token id written to each place, live or dead, [num_blocks, S]; -1: none."""
        at = self._token_at.astype(np.int64)
        return np.where(at < NONE, -2 - at, at).reshape(-1, self.block_size)

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Verify invariants 1 to 5; raises InvariantViolation with both numbers."""
        s, size = self.block_size, self.num_blocks * self.block_size
        if self.extent > size:
            self._fail(f"E = {self.extent}, {self.num_blocks} blocks")
        columns, row = self._columns, self.row
        if int(columns.gap[row]) + self.num_blocks > int(columns.block_capacity[row]):
            self._fail(f"gap {columns.gap[row]} in a segment of {columns.block_capacity[row]}")
        index, token_at = self._places(slice(None)), self._token_at.astype(np.int64)
        ids, dead = np.flatnonzero(self._index >= 0), np.flatnonzero(self._index < NONE)
        places, dead_places = np.flatnonzero(token_at >= 0), np.flatnonzero(token_at < NONE)
        for which, known, at in (("live", index[ids], ids), ("dead", index[dead], dead)):
            if len(known) and not 0 <= known.min() <= known.max() < size:
                self._fail(f"a {which} token has no place")
            named = token_at[known]
            if not np.array_equal(named if which == "live" else -2 - named, at):
                self._fail(f"a place contains another token than the {which} one mapped to it")
        if len(ids) != len(places) or len(dead) != len(dead_places):
            self._fail(
                f"{len(ids)} live tokens have {len(places)} places, "
                f"{len(dead)} dead ones {len(dead_places)}"
            )
        live = np.count_nonzero(token_at.reshape(-1, s) >= 0, axis=1)
        naive = np.bincount(ids // s, minlength=-(-self.num_tokens // s))
        counted = {
            "num_live": len(ids),
            "extent": int(places[-1]) + 1 if len(places) else 0,
            "num_full": int(np.count_nonzero(live == s)),
            "num_dead_slots": len(dead_places),
            "num_naive": int(np.count_nonzero(naive)),
            "num_copies": int(np.count_nonzero(self.hosts_of() >= 0)),
            "num_parked": len(self.parked_ids()),
        }
        for name, number in counted.items():
            recorded = int(self._columns.facts[name][self.row])
            if recorded != number:
                self._fail(f"{name} = {recorded} (counted {number})")
        self._check_blocks(live, naive)
        front = int(self._columns.facts["front"][self.row])
        if (token_at[:front] < 0).any():
            self._fail(f"a hole below front = {front}")
        identity = self.num_tokens == self.num_live == self.extent
        if not self.virtual and not (identity and np.array_equal(index, np.arange(len(index)))):
            self._fail(
                f"identity layout: T = {self.num_tokens}, live = {self.num_live}, E = {self.extent}"
            )

    def _check_blocks(self, live: Ints, naive: Ints) -> None:
        first = int(self._columns.first_token[self.row]) // self.block_size
        naive_live = self._columns.arrays.naive_live[first : first + len(naive)]
        for name, recorded, counted in (
            ("live", self.block_live(), live),
            ("naive live", naive_live, naive),
        ):
            wrong = np.flatnonzero(recorded != counted)
            if len(wrong):
                i = int(wrong[0])
                self._fail(f"{name}[{i}] = {recorded[i]} (counted {counted[i]})")

    def _fail(self, detail: str) -> None:
        raise InvariantViolation("I2", f"{self.request_id}: {detail}")
