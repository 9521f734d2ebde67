"""The token table of one request: where its tokens live, and every change of it.

Knows the pool's liveness counts; knows no policy, no planner, no vLLM. Token ids are RoPE
positions. A physical index is a place in the request's block table: block `blocks[p // S]`, offset
`p % S`, see `vtoken.tables.places`. Until the first eviction the layout is the identity
(index = id).

Appending costs nothing but counting: the newest tokens, the *run*, are entered into the arrays when
something asks for them. With T = num_tokens, E = extent and W = tokens entered, the run is the ids
W..T-1 at the places E-(T-W)..E-1. The identity layout is a run of all tokens.

Invariants (`check`); they hold after every call:
1. every id with an index is what was last written there, and a live one occupies it alone:
   tokens[index[id]] = id,  occupied[index[id]] <=> id is live
2. num_live = |live| = |occupied|
3. E = 1 + the highest occupied index (0 when none),  E <= S * len(blocks)
4. dense  <=>  E = num_live: live tokens fill the front of the block table
The pool counts one reader of this request for each slot of a live token. New tokens are the
exception: who places them tells the pool, for all requests of a step at once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from vtoken.arrays import Bools, Ints
from vtoken.errors import InvariantViolation
from vtoken.tables.naive import NaiveBlocks
from vtoken.tables.partial_blocks import LooseTokens
from vtoken.tables.places import ROOM_BLOCKS, Places
from vtoken.tables.pool import PoolLiveness
from vtoken.tables.rebuild import rebuild


class TokenTable:
    """Placement and liveness of one request's tokens in `pool`."""

    def __init__(self, request_id: str, pool: PoolLiveness, number: int = 0) -> None:
        self.request_id = request_id
        self.pool = pool
        self.number = number  # stands for the request in `pool.owner`; 0: unnamed
        self.block_size = pool.block_size
        self._reset()

    def _reset(self) -> None:
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_live = 0
        self.extent = 0
        self.virtual = False  # False: identity layout
        self._num_entered = 0  # W
        self._index: Ints = np.empty(0, dtype=np.int64)  # [W..] id -> index, -1: slot is gone
        self._live: Bools = np.empty(0, dtype=np.bool_)  # [W..]
        self._places = Places(self.block_size)
        self._block_array: Ints | None = None  # `blocks` as an array, made when asked for
        self._naive: NaiveBlocks | None = None  # made when asked for
        self._loose: LooseTokens | None = None  # made when asked for

    # ------------------------------------------------------------ asking

    @property
    def dense(self) -> bool:
        return self.extent == self.num_live

    @property
    def num_dead(self) -> int:
        return self.num_tokens - self.num_live

    def live_ids(self) -> Ints:
        """Ids of the live tokens [num_live], ascending."""
        if not self.virtual:
            return np.arange(self.num_tokens, dtype=np.int64)
        self._enter()
        return np.flatnonzero(self._live[: self.num_tokens])

    def slots_of(self, ids: Ints) -> Ints:
        """Slots [n] of the tokens `ids` [n]; -1 where a dead token's slot is gone."""
        if not self.virtual:
            return self._slots(ids)
        self._enter()
        index = self._index[ids]
        slots = self._slots(index)
        return np.where(index >= 0, slots, -1) if len(ids) and index.min() < 0 else slots

    def _slots(self, places: Ints) -> Ints:
        ranks, offsets = np.divmod(places, self.block_size)
        slots: Ints = self.block_ids()[ranks] * self.block_size + offsets
        return slots

    def block_ids(self) -> Ints:
        """`blocks` as an array [len(blocks)]; not to be written."""
        if self._block_array is None:
            self._block_array = np.asarray(self.blocks, dtype=np.int64)
        return self._block_array

    def is_live(self, token_id: int) -> bool:
        if not self.virtual:
            return token_id < self.num_tokens
        self._enter()
        return bool(self._live[token_id])

    def grid(self) -> Ints:
        """Live token ids by place, [len(blocks), S]; -1 where no live token is."""
        places, size = self._entered_places()
        ids = np.where(places.occupied[:size], places.tokens[:size], -1)
        return ids.reshape(-1, self.block_size)

    def ghosts(self) -> Ints:
        """Last token id written at each place, live or dead, [len(blocks), S]; -1 = free."""
        places, size = self._entered_places()
        return places.tokens[:size].reshape(-1, self.block_size).copy()

    def num_dead_slots(self) -> int:
        """Dead tokens that still occupy a slot of a held block."""
        if not self.virtual:
            return 0
        self._enter()
        return self._places.num_dead

    def block_live(self) -> Ints:
        """Live tokens of this request, a block of the block table [len(blocks)]."""
        places, _ = self._entered_places()
        return places.live[: len(self.blocks)].copy()

    def full_and_loose(self) -> tuple[Ints, Ints]:
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

    def dead_blocks(self, ids: Ints) -> set[int]:
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

    # ------------------------------------------------------------ changing

    def extend_blocks(self, blocks: Sequence[int]) -> None:
        """The request now holds `blocks` too, after the ones it had."""
        self.blocks.extend(blocks)
        self._block_array = None
        self.pool.hold(blocks, self.number)
        self.pool.tails[self.request_id] = self.blocks[-1] if self.blocks else 0

    def append(self, start: int | None = None) -> int:
        """Register one token at index `start`, by default at E; its slot, which gains a reader.

        Raises InvariantViolation when the held blocks are too few or the place is taken.
        """
        place = self.extent if start is None else start
        rank, offset = divmod(place, self.block_size)
        if rank >= len(self.blocks):
            raise self._does_not_fit(1, place)
        if place == self.extent:
            self.extent = place + 1
        else:
            self._enter()
            self._enter_one(place)
            self.extent = max(self.extent, place + 1)
        self.num_tokens += 1
        self.num_live += 1
        return self.blocks[rank] * self.block_size + offset

    def place(self, num_new: int, start: int | None = None) -> Ints:
        """Register `num_new` tokens at index `start` on, by default at E; below E goes one at most.

        Returns their slots [num_new], which gain a reader. Raises InvariantViolation when the held
        blocks are too few.
        """
        if num_new == 1:
            return np.array([self.append(start)], dtype=np.int64)
        start = self.extent if start is None else start
        if start < self.extent or start + num_new > len(self.blocks) * self.block_size:
            raise self._does_not_fit(num_new, start)
        if num_new == 0:
            return np.empty(0, dtype=np.int64)
        if start > self.extent:
            self._enter()
        self.num_tokens += num_new
        self.num_live += num_new
        self.extent = start + num_new
        return self._slots(np.arange(start, self.extent, dtype=np.int64))

    def grow(self, num_new: int) -> list[int]:
        """`place` of `num_new` tokens at E in a positional table, without arrays; their slots."""
        s, first, end = self.block_size, self.extent, self.extent + num_new
        if end > len(self.blocks) * s:
            raise self._does_not_fit(num_new, first)
        slots: list[int] = []
        while first < end:
            rank, offset = divmod(first, s)
            stop = min(end, (rank + 1) * s)
            start = self.blocks[rank] * s + offset
            slots += range(start, start + stop - first)
            first = stop
        self.num_tokens += num_new
        self.num_live += num_new
        self.extent = end
        return slots

    def _does_not_fit(self, num_new: int, start: int) -> InvariantViolation:
        return InvariantViolation(
            "I4",
            f"{num_new} tokens at index {start} do not fit {len(self.blocks)} blocks "
            f"of {self.block_size} (request {self.request_id})",
        )

    def materialize(self) -> None:
        """Leave the identity layout. Idempotent."""
        self.virtual = True
        self._enter()

    def evict(self, ids: Ints) -> None:
        """The tokens `ids` [n] die; InvariantViolation when one is unknown, dead or doubled."""
        if len(ids) == 0:
            return
        ascending = len(ids) == 1 or bool((ids[1:] > ids[:-1]).all())
        low, high = (ids[0], ids[-1]) if ascending else (ids.min(), ids.max())
        distinct = ascending or len(np.unique(ids)) == len(ids)
        if low < 0 or high >= self.num_tokens or not distinct:
            raise InvariantViolation("I2", f"victims of {self.request_id} are unknown or doubled")
        self.materialize()
        if not self._live[ids].all():
            raise InvariantViolation("I2", f"a victim of {self.request_id} is already dead")
        index = self._index[ids]
        slots = self._slots(index)
        self.pool.remove(slots)
        if self._loose is not None:
            was_full = self._places.live[index[0] // self.block_size] == self.block_size
            if len(ids) > 1 or was_full:
                self._loose = None
            else:
                self._loose.remove(int(slots[0]))
        self._live[ids] = False
        self._places.vacate(index)
        if self._naive and not self._naive.follow(ids, self._live, self.num_tokens):
            self._naive = None
        self.num_live -= len(ids)
        if not self._places.occupied[self.extent - 1]:
            self.extent = self._places.extent(self.extent)

    def apply_moves(self, ids: Ints, slots: Ints, blocks: Sequence[int]) -> list[int]:
        """Live tokens `ids` [n] now live in `slots` [n]; `blocks` is the new block table.

        Blocks that are new in `blocks` become held, blocks that are missing are dropped and
        returned. Atomic: everything is verified first (I2: destinations are distinct and carry no
        live token; no live token stays in a dropped block), and a violation changes nothing.
        """
        self.materialize()
        known_ids = len(ids) == 0 or (ids.min() >= 0 and ids.max() < self.num_tokens)
        if not known_ids or not self._live[ids].all():
            raise InvariantViolation("I1", f"a moved token of {self.request_id} is not live")
        self._places.reserve(len(self.blocks))
        old_blocks, old_index = self.block_ids(), self._index[: self.num_tokens]
        new_blocks = np.asarray(blocks, dtype=np.int64)
        new = rebuild(self._places, old_index, old_blocks, ids, slots, new_blocks, self.request_id)
        num_live = int(new.places.live.sum())
        if num_live != self.num_live:
            raise InvariantViolation(
                "I1",
                f"{self.num_live} live tokens of {self.request_id} before the relocation, "
                f"{num_live} after",
            )
        self.pool.hold(new.fresh, self.number)
        self.pool.remove(self._slots(old_index[ids]))
        self.pool.add(slots)
        self.pool.drop(new.dropped, self.number)
        self.blocks = list(blocks)
        self.pool.tails[self.request_id] = blocks[-1] if len(blocks) else 0
        self._block_array = self._loose = None
        self._index[: self.num_tokens] = new.index
        self._places = new.places
        self.extent = new.places.extent(len(blocks) * self.block_size)
        return new.dropped

    def release(self) -> None:
        """The request lets go of everything (finished or preempted)."""
        live = self.live_ids()
        if len(live):
            self.pool.remove(self.slots_of(live))
        self.pool.drop(self.blocks, self.number)
        self.pool.tails.pop(self.request_id, None)
        self._reset()

    # ------------------------------------------------------------ checking

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
