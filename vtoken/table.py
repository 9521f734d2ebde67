"""The token table of one request: where each logical token lives, and whether it lives.

Knows the pool's liveness counts; knows no policy, no planner, no vLLM. Token ids are RoPE
positions. A physical index is a place in the request's block table: block `blocks[p // S]`, offset
`p % S`. Until the first eviction the layout is the identity (index = id) and costs no arrays.

Invariants (`check`), with T = num_tokens and E = extent:
1. every id with an index is what was last written there, and a live one occupies it alone:
   tokens[index[id]] = id,  occupied[index[id]] <=> id is live
2. num_live = |live| = |occupied|
3. E = 1 + the highest occupied index (0 when none),  E <= S * len(blocks)
4. dense  <=>  E = num_live: live tokens fill the front of the block table
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from vtoken.errors import InvariantViolation
from vtoken.pool import PoolLiveness, Slots

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def _grown(array: npt.NDArray[np.int64], size: int, fill: int) -> npt.NDArray[np.int64]:
    if len(array) >= size:
        return array
    out = np.full(max(size, 2 * len(array)), fill, dtype=array.dtype)
    out[: len(array)] = array
    return out


class TokenTable:
    """Placement and liveness of one request's tokens; keeps `pool` in step with every change."""

    def __init__(self, request_id: str, pool: PoolLiveness) -> None:
        self.request_id = request_id
        self.pool = pool
        self.block_size = pool.block_size
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_live = 0
        self.extent = 0
        self.virtual = False  # False: identity layout, arrays below are empty
        self._index = np.empty(0, dtype=np.int64)  # [T] id -> physical index, -1: slot is gone
        self._live = np.empty(0, dtype=np.bool_)  # [T]
        self._tokens = np.empty(0, dtype=np.int64)  # [E..] physical index -> last id, -1: free
        self._occupied = np.empty(0, dtype=np.bool_)  # [E..] holds a live token
        self._block_array: Ids | None = None  # `blocks` as an array, made when asked for
        self._naive_blocks: int | None = None  # `num_naive_blocks`, counted when asked for

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
        return np.flatnonzero(self._live[: self.num_tokens])

    def slots_of(self, ids: Ids) -> Slots:
        """Slots [n] of the tokens `ids` [n]; -1 where a dead token's slot is gone."""
        index = self._index[ids] if self.virtual else ids
        if len(index) == 1 and index[0] >= 0:
            rank, offset = divmod(int(index[0]), self.block_size)
            return np.array([self.blocks[rank] * self.block_size + offset], dtype=np.int64)
        if self._block_array is None:
            self._block_array = np.asarray(self.blocks, dtype=np.int64)
        ranks, offsets = np.divmod(index, self.block_size)
        slots = self._block_array[ranks] * self.block_size + offsets
        return np.where(index >= 0, slots, -1) if self.virtual else slots

    def is_live(self, token_id: int) -> bool:
        return bool(self._live[token_id]) if self.virtual else token_id < self.num_tokens

    def grid(self) -> npt.NDArray[np.int64]:
        """Live token ids by place, [len(blocks), S]; -1 where no live token is."""
        size = len(self.blocks) * self.block_size
        out = np.full(size, -1, dtype=np.int64)
        if self.virtual:
            n = self.extent
            out[:n] = np.where(self._occupied[:n], self._tokens[:n], -1)
        else:
            out[: self.num_tokens] = np.arange(self.num_tokens)
        return out.reshape(-1, self.block_size)

    def ghosts(self) -> npt.NDArray[np.int64]:
        """Last token id written at each place, live or dead, [len(blocks), S]; -1 = free."""
        size = len(self.blocks) * self.block_size
        out = np.full(size, -1, dtype=np.int64)
        source = self._tokens if self.virtual else np.arange(self.num_tokens, dtype=np.int64)
        n = min(size, len(source))
        out[:n] = source[:n]
        return out.reshape(-1, self.block_size)

    def num_dead_slots(self) -> int:
        """Dead tokens that still occupy a slot of a held block."""
        if not self.virtual:
            return 0
        size = len(self.blocks) * self.block_size
        return int(np.count_nonzero(self._tokens[:size] >= 0)) - self.num_live

    def block_live(self) -> npt.NDArray[np.int64]:
        """Live tokens of this request, a block of the block table [len(blocks)]."""
        if self.virtual:
            size = len(self.blocks) * self.block_size
            live: npt.NDArray[np.int64] = np.count_nonzero(
                self._occupied[:size].reshape(-1, self.block_size), axis=1
            )
            return live
        full, tail = divmod(self.num_tokens, self.block_size)
        out = np.zeros(len(self.blocks), dtype=np.int64)
        out[:full] = self.block_size
        if tail:
            out[full] = tail
        return out

    def full_and_loose(self) -> tuple[npt.NDArray[np.int64], Slots]:
        """Blocks full of live tokens, and the slots of the live tokens in all others."""
        size = len(self.blocks) * self.block_size
        grid = self._occupied[:size].reshape(-1, self.block_size)
        blocks = np.asarray(self.blocks, dtype=np.int64)
        full = grid.all(axis=1)
        rows, offsets = np.nonzero(grid[~full])
        return blocks[full], blocks[~full][rows] * self.block_size + offsets

    def num_naive_blocks(self) -> int:
        """Blocks that this request would hold if tokens never moved and slots were never reused."""
        if not self.virtual:
            return len(self.blocks)
        if self._naive_blocks is None:
            full = self.num_tokens - self.num_tokens % self.block_size
            alive = self._live[:full].reshape(-1, self.block_size).any(axis=1)
            tail = self._live[full : self.num_tokens].any()
            self._naive_blocks = int(np.count_nonzero(alive)) + int(tail)
        return self._naive_blocks

    def dead_blocks(self, ids: Ids) -> set[int]:
        """Those of the blocks in which the dead tokens `ids` [n] lie that hold no live token."""
        s = self.block_size
        if len(ids) > s:  # many blocks: count all at once
            live = self.block_live().tolist()
            return {block for block, n in zip(self.blocks, live, strict=True) if n == 0}
        ranks = set((self._index[ids] // s).tolist())
        return {self.blocks[r] for r in ranks if not self._occupied[r * s : (r + 1) * s].any()}

    def first_hole(self, readonly: Container[int]) -> int | None:
        """Lowest index below E without a live token, in a block that is not in `readonly`."""
        if self.extent == self.num_live:
            return None
        start, s = 0, self.block_size
        while start < self.extent:
            index = start + int(self._occupied[start : self.extent].argmin())
            if self._occupied[index]:
                return None
            if self.blocks[index // s] not in readonly:
                return index
            start = (index // s + 1) * s
        return None

    # ------------------------------------------------------------ changing

    def extend_blocks(self, blocks: Sequence[int]) -> None:
        """The request now holds `blocks` too, after the ones it had."""
        self.blocks.extend(blocks)
        self._block_array = None
        self.pool.hold(blocks)
        if self.virtual:
            size = len(self.blocks) * self.block_size
            self._tokens = _grown(self._tokens, size, -1)
            if len(self._occupied) < len(self._tokens):
                occupied = np.zeros(len(self._tokens), dtype=np.bool_)
                occupied[: len(self._occupied)] = self._occupied
                self._occupied = occupied

    def append_start(self, readonly: Container[int]) -> int:
        """Where appended tokens go: E, or the first index after it that no `readonly` block has."""
        start = self.extent
        for index in range(start // self.block_size, len(self.blocks)):
            if self.blocks[index] in readonly:
                start = (index + 1) * self.block_size
        return start

    def place(self, num_new: int, start: int | None = None) -> Slots:
        """Register `num_new` tokens at index `start` on, by default at E; below E goes one at most.

        Returns their slots [num_new]. Raises InvariantViolation when the held blocks are too few.
        """
        first = self.num_tokens
        start = self.extent if start is None else start
        fits = start + num_new <= len(self.blocks) * self.block_size
        if not fits or (start < self.extent and num_new != 1):
            raise InvariantViolation(
                "I4",
                f"{num_new} tokens at index {start} do not fit {len(self.blocks)} blocks "
                f"of {self.block_size} (request {self.request_id})",
            )
        self._naive_blocks = None
        self.num_tokens += num_new
        self.num_live += num_new
        self.extent = max(self.extent, start + num_new)
        if self.virtual:
            self._register(first, start, num_new)
        if num_new == 1:
            slot = self.blocks[start // self.block_size] * self.block_size + start % self.block_size
            return np.array([slot], dtype=np.int64)
        return self.slots_of(np.arange(first, self.num_tokens, dtype=np.int64))

    def _register(self, first: int, start: int, num_new: int) -> None:
        """Write the tokens `first`.. into the arrays at index `start`.."""
        if self.num_tokens > len(self._index):
            self._index = _grown(self._index, self.num_tokens, -1)
            live = np.zeros(len(self._index), dtype=np.bool_)
            live[: len(self._live)] = self._live
            self._live = live
        end = start + num_new
        if self._occupied[start] if num_new == 1 else self._occupied[start:end].any():
            raise InvariantViolation(
                "I2", f"index {start}+{num_new} of request {self.request_id} is occupied"
            )
        if num_new == 1:  # decoding: plain indexing is several times faster than arrays
            ghost = self._tokens[start]
            if ghost >= 0:
                self._index[ghost] = -1
            self._index[first] = start
            self._live[first] = True
            self._tokens[start] = first
            self._occupied[start] = True
            return
        ghosts = self._tokens[start:end]
        self._index[ghosts[ghosts >= 0]] = -1
        self._index[first : self.num_tokens] = np.arange(start, end)
        self._live[first : self.num_tokens] = True
        self._tokens[start:end] = np.arange(first, self.num_tokens)
        self._occupied[start:end] = True

    def materialize(self) -> None:
        """Leave the identity layout: allocate the arrays. Idempotent."""
        if self.virtual:
            return
        ids = np.arange(self.num_tokens, dtype=np.int64)
        size = len(self.blocks) * self.block_size
        self._index = ids.copy()
        self._live = np.ones(self.num_tokens, dtype=np.bool_)
        self._tokens = np.full(size, -1, dtype=np.int64)
        self._tokens[: self.num_tokens] = ids
        self._occupied = self._tokens >= 0
        self.virtual = True

    def evict(self, ids: Ids) -> None:
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
        self._naive_blocks = None
        self.pool.remove(self.slots_of(ids))
        index = self._index[ids]
        self._live[ids] = False
        self._occupied[index] = False
        self.num_live -= len(ids)
        self._shrink_extent()

    def _shrink_extent(self) -> None:
        if self.extent and not self._occupied[self.extent - 1]:
            occupied = np.flatnonzero(self._occupied[: self.extent])
            self.extent = int(occupied[-1]) + 1 if len(occupied) else 0

    def apply_moves(self, ids: Ids, slots: Slots, blocks: Sequence[int]) -> list[int]:
        """Live tokens `ids` [n] now live in `slots` [n]; `blocks` is the new block table.

        Blocks that are new in `blocks` become held, blocks that are missing are dropped and
        returned. Atomic: everything is verified first (I2: destinations are distinct and carry no
        live token; no live token stays in a dropped block), and a violation changes nothing.
        """
        self.materialize()
        s = self.block_size
        held = set(self.blocks)
        rank = {block: i for i, block in enumerate(blocks)}
        if len(rank) != len(blocks):
            raise InvariantViolation("I2", f"new table of {self.request_id} doubles a block")
        fresh = [block for block in blocks if block not in held]
        dropped = [block for block in self.blocks if block not in rank]
        known_ids = len(ids) == 0 or (ids.min() >= 0 and ids.max() < self.num_tokens)
        if not known_ids or not self._live[ids].all():
            raise InvariantViolation("I1", f"a moved token of {self.request_id} is not live")

        size = len(blocks) * s
        tokens = np.full(size, -1, dtype=np.int64)
        occupied = np.zeros(size, dtype=np.bool_)
        old_rank = np.array([rank.get(block, -1) for block in self.blocks], dtype=np.int64)
        n = len(self.blocks) * s
        where = np.repeat(old_rank, s) * s + np.tile(np.arange(s), len(self.blocks))
        kept = np.repeat(old_rank >= 0, s)
        tokens[where[kept]] = self._tokens[:n][kept]
        occupied[where[kept]] = self._occupied[:n][kept]
        index = self._index.copy()
        known = np.flatnonzero(index[: self.num_tokens] >= 0)
        index[known] = np.where(kept, where, -1)[index[known]]

        try:
            target = np.array([rank[int(b)] for b in slots // s], dtype=np.int64) * s + slots % s
        except KeyError as error:
            raise InvariantViolation("I2", f"destination {error} is not in the table") from None
        if len(np.unique(target)) != len(target) or (len(target) and occupied[target].any()):
            raise InvariantViolation(
                "I2", f"a destination of {self.request_id} is doubled or holds a live token"
            )
        left = index[ids]
        left = left[left >= 0]
        tokens[left] = -1
        occupied[left] = False
        ghosts = tokens[target] if len(target) else np.empty(0, dtype=np.int64)
        index[ghosts[ghosts >= 0]] = -1
        index[ids] = target
        tokens[target] = ids
        occupied[target] = True
        if int(np.count_nonzero(occupied)) != self.num_live:
            raise InvariantViolation(
                "I1",
                f"{self.num_live} live tokens of {self.request_id} before the relocation, "
                f"{int(np.count_nonzero(occupied))} after",
            )

        old_slots = self.slots_of(ids)
        self.pool.hold(fresh)
        self.pool.remove(old_slots)
        self.pool.add(slots)
        self.pool.drop(dropped)
        self.blocks = list(blocks)
        self._block_array = None
        self._index, self._tokens, self._occupied = index, tokens, occupied
        self.extent = size
        self._shrink_extent()
        return dropped

    def release(self) -> None:
        """The request lets go of everything (finished or preempted)."""
        live = self.live_ids()
        if len(live):
            self.pool.remove(self.slots_of(live))
        self.pool.drop(self.blocks)
        self.blocks = []
        self._block_array = None
        self.num_tokens = self.num_live = self.extent = 0
        self.virtual = False

    def check(self) -> None:
        """Verify invariants 1 to 4; raises InvariantViolation with both numbers."""
        if self._block_array is not None and self._block_array.tolist() != self.blocks:
            raise InvariantViolation(
                "I2", f"{self.request_id} holds {self.blocks}, cached as {self._block_array}"
            )
        if not self.virtual:
            capacity = len(self.blocks) * self.block_size
            if not self.num_tokens == self.num_live == self.extent <= capacity:
                raise InvariantViolation(
                    "I2",
                    f"identity layout of {self.request_id}: T = {self.num_tokens}, "
                    f"live = {self.num_live}, E = {self.extent}, {len(self.blocks)} blocks",
                )
            return
        ids = self.live_ids()
        index = self._index[ids]
        size = len(self.blocks) * self.block_size
        occupied = np.flatnonzero(self._occupied[:size])
        if len(ids) and (index.min() < 0 or index.max() >= size):
            raise InvariantViolation("I2", f"a live token of {self.request_id} has no place")
        if not np.array_equal(np.sort(index), occupied):
            raise InvariantViolation(
                "I2",
                f"{self.request_id}: {len(np.unique(index))} places for {len(ids)} live tokens, "
                f"{len(occupied)} occupied",
            )
        known = np.flatnonzero(self._index[: self.num_tokens] >= 0)
        if not np.array_equal(self._tokens[self._index[known]], known):
            raise InvariantViolation("I2", f"{self.request_id}: a place names another token")
        extent = int(occupied[-1]) + 1 if len(occupied) else 0
        if len(ids) != self.num_live or extent != self.extent:
            raise InvariantViolation(
                "I2",
                f"{self.request_id}: num_live = {self.num_live} (counted {len(ids)}), "
                f"E = {self.extent} (counted {extent})",
            )
