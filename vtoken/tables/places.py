"""What lies at each place of one request's block table: token ids, liveness, holes.

Knows blocks by their rank in the table only, neither pool nor request. A place is `rank * S +
offset`; arrays have room beyond the places that exist. The ids in `tokens` outlive their tokens: a
dead token's K/V stays readable until its place is written again.

Invariants (`check`):
1. live[r] = |{p : p // S = r, occupied[p]}|
2. every place below `front` is occupied
3. num_dead = |{p : tokens[p] >= 0, not occupied[p]}|
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from vtoken.arrays import Bools, Ints
from vtoken.errors import InvariantViolation

ROOM_BLOCKS = 8  # that may join before arrays must be made larger


class Places:
    """Occupancy of the places of one block table, kept incrementally."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: Ints = np.empty(0, dtype=np.int64)  # [P] last id written there, -1: none
        self.occupied: Bools = np.empty(0, dtype=np.bool_)  # [P] that token lives
        self.live: Ints = np.empty(0, dtype=np.int64)  # [P / S] occupied places, a block
        self.front = 0
        self.num_dead = 0

    @classmethod
    def of(cls, tokens: Ints, occupied: Bools, block_size: int) -> Places:
        """Places [n * S] with the given contents."""
        out = cls(block_size)
        out.tokens, out.occupied = tokens, occupied
        out.live = np.count_nonzero(occupied.reshape(-1, block_size), axis=1)
        out.num_dead = int(np.count_nonzero(tokens >= 0)) - int(out.live.sum())
        return out

    def reserve(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks and a few more, at least half as many as there were."""
        known = len(self.live)
        if num_blocks <= known:
            return
        num_blocks = max(num_blocks + ROOM_BLOCKS, known + known // 2)
        old, size = known * self.block_size, num_blocks * self.block_size
        tokens, occupied = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.bool_)
        live = np.zeros(num_blocks, dtype=np.int64)
        tokens[:old], occupied[:old], live[:known] = self.tokens, self.occupied, self.live
        self.tokens, self.occupied, self.live = tokens, occupied, live

    # ------------------------------------------------------------ asking

    def extent(self, limit: int) -> int:
        """1 + the highest occupied place below `limit`; 0 when there is none."""
        tail = self.occupied[:limit][::-1]
        behind = int(tail.argmax()) if limit else 0
        return limit - behind if limit and tail[behind] else 0

    def first_hole(
        self, extent: int, blocks: Sequence[int], readonly: Container[int]
    ) -> int | None:
        """Lowest unoccupied place below `extent` whose block is not in `readonly`."""
        start, s = self.front, self.block_size
        while start < extent:
            place = start + int(self.occupied[start:extent].argmin())
            full = bool(self.occupied[place])
            if start == self.front:
                self.front = extent if full else place
            if full:
                return None
            if blocks[place // s] not in readonly:
                return place
            start = (place // s + 1) * s
        return None

    # ------------------------------------------------------------ changing

    def write(self, start: int, first_id: int, num_new: int) -> Ints:
        """Ids `first_id`.. live at `start`..; returns the dead ids that were last there.

        Raises InvariantViolation when one of the places is occupied.
        """
        end = start + num_new
        if self.occupied[start:end].any():
            raise InvariantViolation("I2", f"one of the places {start}..{end - 1} is occupied")
        ghosts = self.tokens[start:end]
        ghosts = ghosts[ghosts >= 0]
        self.num_dead -= len(ghosts)
        self.tokens[start:end] = np.arange(first_id, first_id + num_new)
        self.occupied[start:end] = True
        first, last = start // self.block_size, (end - 1) // self.block_size
        if first == last:
            self.live[first] += num_new
        else:
            self._count(first, last + 1)
        return ghosts

    def write_one(self, place: int, token_id: int) -> int:
        """`write` of one token; the id that was last there, -1: none."""
        if self.occupied[place]:
            raise InvariantViolation("I2", f"place {place} is occupied")
        ghost = int(self.tokens[place])
        self.num_dead -= ghost >= 0
        self.tokens[place] = token_id
        self.occupied[place] = True
        self.live[place // self.block_size] += 1
        return ghost

    def vacate(self, places: Ints) -> None:
        """The tokens at the occupied `places` [n] die."""
        self.occupied[places] = False
        self.num_dead += len(places)
        if len(places) == 1:
            place = int(places[0])
            self.live[place // self.block_size] -= 1
            self.front = min(self.front, place)
            return
        self.live -= np.bincount(places // self.block_size, minlength=len(self.live))
        self.front = min(self.front, int(places.min()))

    def _count(self, first: int, end: int) -> None:
        s = self.block_size
        grid = self.occupied[first * s : end * s].reshape(-1, s)
        self.live[first:end] = np.count_nonzero(grid, axis=1)

    def check(self, owner: str) -> None:
        """Verify invariants 1 to 3 for the request `owner`."""
        live = np.count_nonzero(self.occupied.reshape(-1, self.block_size), axis=1)
        wrong = np.flatnonzero(live != self.live)
        if len(wrong):
            rank = int(wrong[0])
            raise InvariantViolation(
                "I2", f"{owner}: live[{rank}] = {self.live[rank]} (counted {live[rank]})"
            )
        if not self.occupied[: self.front].all():
            raise InvariantViolation("I2", f"{owner}: a hole below front = {self.front}")
        num_dead = int(np.count_nonzero((self.tokens >= 0) & ~self.occupied))
        if num_dead != self.num_dead:
            raise InvariantViolation(
                "I2", f"{owner}: num_dead = {self.num_dead} (counted {num_dead})"
            )
