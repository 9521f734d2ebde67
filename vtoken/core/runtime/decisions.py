"""The decisions of a step: victims, moves and restores, chosen before the engine allocates.

Collected by row between `begin_step` and `commit_step`, then turned into the columns of the
worker's plan. A request that releases its blocks in between is removed from them.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Ints, Ragged
from vtoken.base.compiled import kernel
from vtoken.core.protocol.step import NO_IDS, Retained

IdsAndSlots = dict[int, tuple[Ints, Ints]]  # by row


def pick(wanted: Ints, rows: Ints, given: Ragged, num_rows: int) -> Ragged:
    """The numbers of the rows `wanted` [k], from `given`, whose request i has row `rows[i]`."""
    starts = np.empty(len(wanted) + 1, dtype=np.int64)
    out = np.empty(len(given.values), dtype=np.int64)
    place = np.full(num_rows, -1, dtype=np.int64)
    total = _pick(wanted, rows, given, place, out, starts)
    return Ragged(out[:total], starts)


class StepDecisions:
    """`evicted_rows` [k] (-1: removed) and the victims of each. By row: `moved` and `restored` ids
    and slots, the rewritten `blocks`, the `retained` tokens. `resumed`: rows that start in this
    step with tokens from host memory.
    """

    def __init__(self) -> None:
        self.evicted_rows: Ints = NO_IDS
        self.evicted = Ragged.empty()
        self.moved: IdsAndSlots = {}
        self.restored: IdsAndSlots = {}
        self.blocks: dict[int, Ints] = {}
        self.retained: dict[int, Retained] = {}
        self.resumed: set[int] = set()

    def evict(self, rows: Ints, ids: Ragged) -> None:
        """Set the step's evictions, of all requests at once."""
        self.evicted_rows, self.evicted = rows, ids

    def drop(self, row: int) -> None:
        """Remove a request that releases its blocks; its row may be reused."""
        if len(self.evicted_rows):
            self.evicted_rows = np.where(self.evicted_rows == row, -1, self.evicted_rows)
        for parts in (self.moved, self.restored, self.blocks, self.retained):
            parts.pop(row, None)

    @property
    def is_empty(self) -> bool:
        """Whether no request is concerned."""
        return not (len(self.evicted_rows) or self.moved or self.restored or self.blocks)

    def other_rows(self, rows: Ints) -> list[int]:
        """The concerned rows that are not in `rows`."""
        changed = {*self.evicted_rows.tolist(), *self.moved, *self.restored, *self.blocks}
        return sorted(changed.difference(rows.tolist(), (-1,)))

    def evicted_of(self, rows: Ints, num_rows: int) -> Ragged:
        return pick(rows, self.evicted_rows, self.evicted, num_rows)

    def moved_of(self, rows: Ints, num_rows: int) -> tuple[Ragged, Ragged]:
        """Moved ids and their slots, with the same starts."""
        return _ids_and_slots(self.moved, rows, num_rows)

    def restored_of(self, rows: Ints, num_rows: int) -> tuple[Ragged, Ragged]:
        """Restored ids and their slots, with the same starts."""
        return _ids_and_slots(self.restored, rows, num_rows)


def _ids_and_slots(parts: IdsAndSlots, rows: Ints, num_rows: int) -> tuple[Ragged, Ragged]:
    if not parts:
        return Ragged.empty(len(rows)), Ragged.empty(len(rows))
    own = np.fromiter(parts, dtype=np.int64)
    ids = pick(rows, own, Ragged.joined(i for i, _ in parts.values()), num_rows)
    slots = pick(rows, own, Ragged.joined(s for _, s in parts.values()), num_rows)
    return ids, Ragged(slots.values, ids.starts)


# ---------------------------------------------------------------- kernels


@kernel
def _pick(wanted: Ints, rows: Ints, given: Ragged, place: Ints, out: Ints, out_starts: Ints) -> int:
    """Copy the numbers of the rows `wanted` [k], distinct, to `out`; returns their count.

    Row rows[j] has the numbers of request j of `given`; a row not in `rows` has none. Writes
    offsets to `out_starts` [k + 1]. `place`: scratch by row, -1 before.
    """
    for j in range(len(rows)):
        if rows[j] >= 0:
            place[rows[j]] = j
    total = 0
    out_starts[0] = 0
    for i in range(len(wanted)):
        j = place[wanted[i]]
        if j >= 0:
            for at in range(given.starts[j], given.starts[j + 1]):
                out[total] = given.values[at]
                total += 1
        out_starts[i + 1] = total
    return total
