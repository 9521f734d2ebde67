"""The draft of a step: what was decided about requests before the engine allocates.

Knows rows. What a request's victims and moves are is collected here between `begin_step` and
`commit_step`, and leaves as the columns of the worker's plan. A request that lets go of its blocks
in between takes its part along.
"""

from __future__ import annotations

import numpy as np

from vtoken.arrays import Ints, Ragged
from vtoken.protocol.step import NO_IDS, Retained
from vtoken.runtime import kernels


def pick(wanted: Ints, rows: Ints, given: Ragged, num_rows: int) -> Ragged:
    """The numbers of the `wanted` [k] rows out of `given`, whose requests are `rows`."""
    starts = np.empty(len(wanted) + 1, dtype=np.int64)
    out = np.empty(len(given.values), dtype=np.int64)
    place = np.full(num_rows, -1, dtype=np.int64)
    total = kernels.pick(wanted, rows, given.values, given.starts, place, out, starts)
    return Ragged(out[:total], starts)


class StepDraft:
    """`evicted_rows` [k] and what each loses; a row of -1 has no part. By row: `moved` ids and
    slots, the rewritten `blocks`, `retained` tokens.
    """

    def __init__(self) -> None:
        self.evicted_rows: Ints = NO_IDS
        self.evicted = Ragged.empty()
        self.moved: dict[int, tuple[Ints, Ints]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.retained: dict[int, Retained] = {}

    def evict(self, rows: Ints, ids: Ragged) -> None:
        """The step's evictions, of all requests at once."""
        self.evicted_rows, self.evicted = rows, ids

    def drop(self, row: int) -> None:
        """The request lets go of its blocks; the row may be given to another one."""
        if len(self.evicted_rows):
            self.evicted_rows = np.where(self.evicted_rows == row, -1, self.evicted_rows)
        for parts in (self.moved, self.blocks, self.retained):
            parts.pop(row, None)

    @property
    def is_empty(self) -> bool:
        """Whether no request has a part in the step."""
        return not (len(self.evicted_rows) or self.moved or self.blocks)

    def rows_beside(self, rows: Ints) -> list[int]:
        """Rows that have a part in the step, without those of `rows`."""
        mine = {*self.evicted_rows.tolist(), *self.moved, *self.blocks}
        return sorted(mine.difference(rows.tolist(), (-1,)))

    def evicted_of(self, rows: Ints, num_rows: int) -> Ragged:
        return pick(rows, self.evicted_rows, self.evicted, num_rows)

    def moved_of(self, rows: Ints, num_rows: int) -> tuple[Ragged, Ragged]:
        """Ids and slots, with the same starts."""
        if not self.moved:
            return Ragged.empty(len(rows)), Ragged.empty(len(rows))
        movers = np.fromiter(self.moved, dtype=np.int64)
        ids = pick(rows, movers, Ragged.joined(i for i, _ in self.moved.values()), num_rows)
        slots = pick(rows, movers, Ragged.joined(s for _, s in self.moved.values()), num_rows)
        return ids, Ragged(slots.values, ids.starts)
