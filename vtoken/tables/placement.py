"""Where each logical token of one request lives, and whether it lives.

Knows neither the pool nor who changes it. Token ids are RoPE positions. A physical index is a place
in the request's block table: block `blocks[p // S]`, offset `p % S`, see `vtoken.tables.places`.
Until the first eviction the layout is the identity (index = id).

Appending costs nothing but counting: the newest tokens, the *run*, are entered into the arrays when
something asks for them. With T = num_tokens, E = extent and W = tokens entered, the run is the ids
W..T-1 at the places E-(T-W)..E-1. The identity layout is a run of all tokens.

Invariants (`check`):
1. every id with an index is what was last written there, and a live one occupies it alone:
   tokens[index[id]] = id,  occupied[index[id]] <=> id is live
2. num_live = |live| = |occupied|
3. E = 1 + the highest occupied index (0 when none),  E <= S * len(blocks)
4. dense  <=>  E = num_live: live tokens fill the front of the block table
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from vtoken.errors import InvariantViolation
from vtoken.tables.naive import NaiveBlocks
from vtoken.tables.partial_blocks import LooseTokens
from vtoken.tables.places import ROOM_BLOCKS, Places
from vtoken.tables.pool import Slots

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Placement:
    """Token ids -> places -> slots of one request; what can be asked."""

    def __init__(self, request_id: str, block_size: int) -> None:
        self.request_id = request_id
        self.block_size = block_size
        self._reset()

    def _reset(self) -> None:
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_live = 0
        self.extent = 0
        self.virtual = False  # False: identity layout
        self._num_entered = 0  # W
        self._index: Ids = np.empty(0, dtype=np.int64)  # [W..] id -> index, -1: slot is gone
        self._live: Mask = np.empty(0, dtype=np.bool_)  # [W..]
        self._places = Places(self.block_size)
        self._block_array: Ids | None = None  # `blocks` as an array, made when asked for
        self._naive: NaiveBlocks | None = None  # made when asked for
        self._loose: LooseTokens | None = None  # made when asked for

    # ------------------------------------------------------------ asking

    @property
    def dense(self) -> bool:
        return self.extent == self.num_live

    @property
    def num_dead(self) -> int:
        return self.num_tokens - self.num_live

    def live_ids(self) -> Ids:
        """Ids of the live tokens [num_live], ascending."""
        if not self.virtual:
            return np.arange(self.num_tokens, dtype=np.int64)
        self._enter()
        return np.flatnonzero(self._live[: self.num_tokens])

    def slots_of(self, ids: Ids) -> Slots:
        """Slots [n] of the tokens `ids` [n]; -1 where a dead token's slot is gone."""
        if not self.virtual:
            return self._slots(ids)
        self._enter()
        index = self._index[ids]
        slots = self._slots(index)
        return np.where(index >= 0, slots, -1) if len(ids) and index.min() < 0 else slots

    def _slots(self, places: Ids) -> Slots:
        ranks, offsets = np.divmod(places, self.block_size)
        slots: Slots = self.block_ids()[ranks] * self.block_size + offsets
        return slots

    def block_ids(self) -> Ids:
        """`blocks` as an array [len(blocks)]; not to be written."""
        if self._block_array is None:
            self._block_array = np.asarray(self.blocks, dtype=np.int64)
        return self._block_array

    def is_live(self, token_id: int) -> bool:
        if not self.virtual:
            return token_id < self.num_tokens
        self._enter()
        return bool(self._live[token_id])

    def grid(self) -> Ids:
        """Live token ids by place, [len(blocks), S]; -1 where no live token is."""
        places, size = self._entered_places()
        ids = np.where(places.occupied[:size], places.tokens[:size], -1)
        return ids.reshape(-1, self.block_size)

    def ghosts(self) -> Ids:
        """Last token id written at each place, live or dead, [len(blocks), S]; -1 = free."""
        places, size = self._entered_places()
        return places.tokens[:size].reshape(-1, self.block_size).copy()

    def num_dead_slots(self) -> int:
        """Dead tokens that still occupy a slot of a held block."""
        if not self.virtual:
            return 0
        self._enter()
        return self._places.num_dead

    def block_live(self) -> Ids:
        """Live tokens of this request, a block of the block table [len(blocks)]."""
        places, _ = self._entered_places()
        return places.live[: len(self.blocks)].copy()

    def full_and_loose(self) -> tuple[Ids, Slots]:
        """Blocks full of live tokens, and the slots of the live tokens in all others."""
        places, _ = self._entered_places()
        if self._loose is None:
            self._loose = LooseTokens(places, self.block_ids())
        return self._loose.full_blocks, self._loose.slots

    def num_naive_blocks(self) -> int:
        """Blocks that this request would hold if tokens never moved and slots were never reused."""
        if not self.virtual:
            return len(self.blocks)
        if self._naive is None:
            self._enter()
            self._naive = NaiveBlocks(self._live, self.num_tokens, self.block_size)
        return self._naive.count(self.num_tokens)

    def dead_blocks(self, ids: Ids) -> set[int]:
        """Those of the blocks in which the dead tokens `ids` [n] lie that hold no live token."""
        self._enter()
        ranks = self._index[ids] // self.block_size
        empty = ranks[self._places.live[ranks] == 0]
        return {self.blocks[rank] for rank in empty.tolist()}

    def first_hole(self, readonly: Container[int]) -> int | None:
        """Lowest index below E without a live token, in a block that is not in `readonly`."""
        if self.extent == self.num_live:
            return None
        places, _ = self._entered_places()
        return places.first_hole(self.extent, self.blocks, readonly)

    def append_start(self, readonly: Container[int]) -> int:
        """Where appended tokens go: E, or the first index after it that no `readonly` block has."""
        start = self.extent
        for index in range(start // self.block_size, len(self.blocks)):
            if self.blocks[index] in readonly:
                start = (index + 1) * self.block_size
        return start

    # ------------------------------------------------------------ the run

    def _entered_places(self) -> tuple[Places, int]:
        """The places with the run entered, and how many of them the blocks have."""
        self._enter()
        size = len(self.blocks) * self.block_size
        if size > len(self._places.tokens):
            self._places.reserve(len(self.blocks))
        return self._places, size

    def _enter(self) -> None:
        """Enter the run into the arrays."""
        first, num_new = self._num_entered, self.num_tokens - self._num_entered
        if num_new == 0:
            return
        start = self.extent - num_new
        if num_new == 1:
            self._enter_one(start)
            return
        self._reserve(self.num_tokens)
        ghosts = self._places.write(start, first, num_new)
        self._index[ghosts] = -1
        self._index[first : self.num_tokens] = np.arange(start, self.extent)
        self._live[first : self.num_tokens] = True
        self._num_entered = self.num_tokens
        self._loose = None

    def _enter_one(self, place: int) -> None:
        """Enter the token W at `place`: plain indexing is several times faster than arrays."""
        token = self._num_entered
        if token >= len(self._index) or place >= len(self._places.tokens):
            self._reserve(token + 1)
        ghost = self._places.write_one(place, token)
        if ghost >= 0:
            self._index[ghost] = -1
        self._index[token] = place
        self._live[token] = True
        self._num_entered = token + 1
        if self._loose is not None:
            rank, offset = divmod(place, self.block_size)
            if self._places.live[rank] == self.block_size:
                self._loose = None
            else:
                self._loose.add(self.blocks[rank] * self.block_size + offset)

    def _reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` ids and for the places of all blocks."""
        self._places.reserve(len(self.blocks))
        known = len(self._index)
        if num_tokens > known:
            size = max(num_tokens + ROOM_BLOCKS * self.block_size, known + known // 2)
            index, live = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.bool_)
            index[:known], live[:known] = self._index, self._live
            self._index, self._live = index, live

    def check(self) -> None:
        """Verify invariants 1 to 4; raises InvariantViolation with both numbers."""
        if self._block_array is not None and self._block_array.tolist() != self.blocks:
            raise InvariantViolation(
                "I2", f"{self.request_id} holds {self.blocks}, cached as {self._block_array}"
            )
        size = len(self.blocks) * self.block_size
        if self.extent > size:
            raise InvariantViolation(
                "I2", f"{self.request_id}: E = {self.extent}, {len(self.blocks)} blocks"
            )
        if not self.virtual:
            if not self.num_tokens == self.num_live == self.extent:
                raise InvariantViolation(
                    "I2",
                    f"identity layout of {self.request_id}: T = {self.num_tokens}, "
                    f"live = {self.num_live}, E = {self.extent}",
                )
            return
        self._enter()
        self._places.check(self.request_id)
        ids = self.live_ids()
        index = self._index[ids]
        occupied = np.flatnonzero(self._places.occupied)
        if len(ids) and (index.min() < 0 or index.max() >= size):
            raise InvariantViolation("I2", f"a live token of {self.request_id} has no place")
        if not np.array_equal(np.sort(index), occupied):
            raise InvariantViolation(
                "I2",
                f"{self.request_id}: {len(np.unique(index))} places for {len(ids)} live tokens, "
                f"{len(occupied)} occupied",
            )
        known = np.flatnonzero(self._index[: self.num_tokens] >= 0)
        if not np.array_equal(self._places.tokens[self._index[known]], known):
            raise InvariantViolation("I2", f"{self.request_id}: a place names another token")
        extent = int(occupied[-1]) + 1 if len(occupied) else 0
        if len(ids) != self.num_live or extent != self.extent:
            raise InvariantViolation(
                "I2",
                f"{self.request_id}: num_live = {self.num_live} (counted {len(ids)}), "
                f"E = {self.extent} (counted {extent})",
            )
