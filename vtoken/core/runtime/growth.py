"""Growth: adds the scheduled tokens to their tables and chooses where the next ones go.

Independent of policies and relocation. Invariants:
1. appended tokens go behind the last one, in order; a single one may go into a hole instead
2. tokens of a request that has evicted something are written to private, unhashed blocks only (I4)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.base.arrays import Ints, Ragged, starts_of
from vtoken.base.errors import InvariantViolation
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import RequestSteps
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.decisions import pick
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.requests import Requests
from vtoken.core.runtime.swapping import Swapper
from vtoken.core.tables.token_tables import AppendedTokens, Places

NO_STEPS = RequestSteps()  # no request has evicted


@dataclass(slots=True)
class Scheduled:
    """The requests of a step after allocation, as columns: all tokens, this step's included, and
    the number of blocks held. `new`: those without a table, scheduled for the first time or again
    after a preemption.
    """

    request_ids: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    new: dict[str, HeldRequest] = field(default_factory=dict)


@dataclass(eq=False)
class TokenAppender:
    """Places the new tokens of one runtime's requests."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _swapper: Swapper

    def __post_init__(self) -> None:
        self._places: Places | None = None  # None: every layout is the identity

    def choose_places(self) -> bool:
        """Choose where each request's next single token is written: a hole, or behind the last.

        Returns whether a request with holes holds more blocks than its live tokens and the next one
        need.
        """
        tables = self._requests.tables
        self._places = None
        if tables.any_virtual:
            # What a drafter computes is behind the last token: that one takes no hole.
            recycling = self._active.config.recycles and not self._shape.lookahead
            self._places = tables.choose_places(recycling=recycling)
        return self._places is not None and self._places.spare

    def required_extent(self, request_id: str, num_tokens: int) -> int:
        """Places that `num_tokens` tokens in total require, dead ones included."""
        row = self._requests.tables.rows.get(request_id)
        if row is None:
            return self._swapper.places(request_id, num_tokens)
        if self._places is None:
            return num_tokens
        num_new = num_tokens - self._places.num_tokens[row]
        if num_new == 1:
            return self._places.next_extent[row]
        return self._places.start[row] + num_new

    def append(self, scheduled: Scheduled) -> tuple[Ints, AppendedTokens]:
        """Append the new tokens of all scheduled requests; returns their rows [k] and the slots."""
        tables = self._requests.tables
        for name, request in scheduled.new.items():
            if name in self._swapper.requests:
                self._swapper.resume(name)
            else:
                self._requests.admit(request)
        rows = tables.rows_of(scheduled.request_ids)
        if len(rows) != len(scheduled.request_ids):
            unknown = {*scheduled.request_ids}.difference(tables.rows)
            raise InvariantViolation("I4", f"{min(unknown)} is scheduled and has no table")
        added = self._added_blocks(scheduled, rows)
        totals = np.array(scheduled.num_tokens, dtype=np.int64)
        grown = tables.grow(rows, totals, added)
        self._current.counters.reclamation.recycled_slots += grown.num_recycled
        self._current.check_private(self._store, grown.written.tolist(), "new tokens")
        return rows, grown

    def _added_blocks(self, scheduled: Scheduled, rows: Ints) -> Ragged:
        """The blocks that requests gained since the last step."""
        tables = self._requests.tables
        known = tables.columns.num_blocks[rows]
        more = np.array(scheduled.num_blocks, dtype=np.int64) - known
        if np.count_nonzero(more) == 0:
            return Ragged.empty(len(rows))
        added: list[int] = []
        for i in np.flatnonzero(more).tolist():
            name = scheduled.request_ids[i]
            if more[i] < 0:
                raise InvariantViolation(
                    "I4", f"{name} holds {scheduled.num_blocks[i]} blocks, its table has {known[i]}"
                )
            added += self._store.blocks_from(name, int(known[i]))
        return Ragged(np.array(added, dtype=np.int64), starts_of(more))

    def plan(self, rows: Ints, grown: AppendedTokens) -> RequestSteps:
        """The worker's part of the step: the scheduled `rows` [k] that have evicted something, and
        all rows with evicted, moved or restored tokens.
        """
        tables = self._requests.tables
        decided, columns = self._current.take_decisions(), tables.columns
        virtual = columns.virtual[rows] != 0
        num_virtual = np.count_nonzero(virtual)
        if decided.is_empty and num_virtual == 0:
            return NO_STEPS
        others = decided.other_rows(rows)
        chosen = rows if num_virtual == len(rows) else rows[virtual]
        if others:
            chosen = np.append(chosen, np.array(others, dtype=np.int64))
        new_slots = Ragged(grown.slots, grown.starts)
        if len(chosen) != len(rows) or others:
            new_slots = pick(chosen, rows, new_slots, columns.num_rows)
        num_rows = columns.num_rows
        evicted = nothing = Ragged.empty(len(chosen))
        moved = restored = (nothing, nothing)
        if not decided.is_empty:
            evicted = decided.evicted_of(chosen, num_rows)
            moved = decided.moved_of(chosen, num_rows)
            restored = decided.restored_of(chosen, num_rows)
        names, numbers = tables.names, chosen.tolist()
        num_live = columns.num_live[chosen]
        steps = RequestSteps(
            [names[row] for row in numbers],
            columns.num_tokens[chosen] - new_slots.counts,
            num_live,
            columns.extent[chosen] == num_live,
            evicted,
            *moved,
            *restored,
            new_slots,
            nothing,
            {names[row]: blocks for row, blocks in decided.blocks.items()},
            {names[row]: retained for row, retained in decided.retained.items()},
            frozenset(names[row] for row in decided.resumed),
        )
        if self._shape.borrows_blocks:
            steps.scratch = self._borrow(chosen, steps)
        return steps

    def _borrow(self, rows: Ints, steps: RequestSteps) -> Ragged:
        """Free blocks for packing the requests with holes that decode one token in this step."""
        columns, size = self._requests.tables.columns, self._shape.block_size
        with_holes = ~steps.dense & (steps.new_slots.counts == 1)
        if not with_holes.any():
            return steps.scratch
        partial = columns.num_live[rows] - columns.num_full[rows] * size
        needs = np.where(with_holes, -(-partial // size), 0)
        borrowed = np.array(self._store.borrow(int(needs.sum())), dtype=np.int64)
        # If too few blocks are free, the last requests use the worker's side buffer.
        needs[np.cumsum(needs) > len(borrowed)] = 0
        starts = starts_of(needs)
        return Ragged(borrowed[: starts[-1]], starts)
