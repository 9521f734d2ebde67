"""The token table of one request: its placement, and every change of it, in step with the pool.

Knows the pool's liveness counts; knows no policy, no planner, no vLLM. What holds of a placement
(`vtoken.tables.placement`) holds after every call, and the pool counts one reader of this request
for each slot of a live token. New tokens are the exception: who places them tells the pool, for
all requests of a step at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.errors import InvariantViolation
from vtoken.tables.placement import Ids, Mask, Placement
from vtoken.tables.pool import PoolLiveness, Slots
from vtoken.tables.rebuild import rebuild

__all__ = ["Ids", "Mask", "TokenTable"]


class TokenTable(Placement):
    """Placement and liveness of one request's tokens in `pool`."""

    def __init__(self, request_id: str, pool: PoolLiveness, number: int = 0) -> None:
        super().__init__(request_id, pool.block_size)
        self.pool = pool
        self.number = number  # stands for the request in `pool.owner`; 0: unnamed

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

    def place(self, num_new: int, start: int | None = None) -> Slots:
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

    def apply_moves(self, ids: Ids, slots: Slots, blocks: Sequence[int]) -> list[int]:
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
