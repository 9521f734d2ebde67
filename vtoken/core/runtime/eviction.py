"""Eviction: which tokens die now, and which blocks become empty.

Independent of relocation and of the engine. Who gives tokens for blocks that are short, and how
many, `vtoken.core.runtime.shortage` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Bools, Ints, Ragged, runs_of
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.sharing import keeps_dead_shared_blocks
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.due import is_due, phases
from vtoken.core.runtime.losses import Losses
from vtoken.core.runtime.parking import Parking
from vtoken.core.runtime.ranking import Ranking
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables import kernels
from vtoken.core.tables.token_table import TokenTable
from vtoken.sentences import counted

REFUSED = {
    kernels.UNKNOWN: "unknown or duplicate",
    kernels.DEAD: "already dead",
    kernels.MISCOUNTED: "fewer or more than are due",
    kernels.NEWEST: "the newest token among others",
    kernels.PROTECTED: "protected",
}


class Evicted(NamedTuple):
    """Whether a token died, and the blocks that left a table, one entry a table."""

    died: bool
    freed: list[int]


NOTHING_DIED = Evicted(False, [])


@dataclass(eq=False)
class Evictor:
    """Applies the configured policy to the tables of one runtime."""

    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _ranking: Ranking
    _losses: Losses
    _parking: Parking

    def __post_init__(self) -> None:
        self._any_retained = False  # whether some request may retain dead blocks

    # ------------------------------------------------------------ who is due

    def is_due(self, table: TokenTable, config: VTokenConfig) -> bool:
        """Whether `config` would evict from `table` before its next tokens are computed."""
        return self._is_longer(table, *phases(self._requests.rules(table.request_id, config)))

    def may_give(self, table: TokenTable, rules: VTokenConfig) -> bool:
        """Whether a request of these `rules` may give tokens before its next ones are computed."""
        return rules.gives and self._is_longer(table, rules.budget_tokens, *phases(rules)[1:])

    def _is_longer(self, table: TokenTable, limit: int, in_prefill: bool, in_decode: bool) -> bool:
        due, row = self._requests.due, table.row
        return bool(
            is_due(
                table.num_live,
                table.num_tokens,
                due.prefill_end[row],
                due.waits[row],
                limit,
                in_prefill,
                in_decode,
            )
        )

    def due_by_length(self, rows: Ints) -> Ints:
        """Those of `rows` that are due because of their length, and were not relocated in this
        step; the others stay due.

        The worker evicts before it moves, so a relocated token dies in a later step.
        """
        rows = self._requests.due.select(rows, self._requests.tables.columns)
        if not self._current.decisions.moved:
            return rows
        moved = np.isin(rows, list(self._current.decisions.moved))
        self._wait(rows[moved])
        return rows[~moved]

    def _wait(self, rows: Ints) -> None:
        """Let requests that are due now stay due beyond their prompt's end."""
        self._requests.due.waits[rows] |= self._requests.left_of_prompts(rows) == 0

    # ------------------------------------------------------------ tokens die

    def evict(self, rows: Ints) -> Evicted:
        """Evict from the due `rows`, down to the target of each."""
        if len(rows) == 0:
            return NOTHING_DIED
        due = rows
        rows, victims = self._ranking.choose(due)
        if len(rows) < len(due):
            self._wait(np.setdiff1d(due, rows))
        rows, victims, emptied = self._apply(rows, victims)
        if len(victims.values) == 0:
            return NOTHING_DIED
        self._losses.report(rows, victims, self._parking.park(rows, victims))
        freed: list[int] = []
        for row in emptied.tolist():
            table = self._requests.tables.at(row)
            freed += self._drop_dead_blocks(table, table.block_live() == 0)
        self._note_reclaimed(freed)
        return Evicted(True, freed)

    def _apply(self, rows: Ints, victims: Ragged) -> tuple[Ints, Ragged, Ints]:
        """Mark the victims of `rows` [k] dead. Returns the rows where they died, their victims, and
        the rows of which a block has no live token any more.

        A policy whose victims are refused is not asked again. A request's shared and hashed blocks
        become read-only at its first eviction; blocks that it takes later are neither.
        """
        tables, due = self._requests.tables, self._requests.due
        due.waits[rows] = False
        for row in rows[tables.columns.virtual[rows] == 0].tolist():
            table = tables.at(row)
            table.protect(b for b in table.blocks if not self._store.is_writable(b))
        num_due = tables.columns.num_live[rows] - due.target[rows]
        codes, num_emptied = tables.evict(rows, victims, num_due, due.protected(rows))
        died = codes == kernels.DONE
        self._current.decisions.evict(rows if died.all() else np.where(died, rows, -1), victims)
        for i in np.flatnonzero(~died).tolist():
            name = tables.names[rows[i]]
            why = f"victims of {name} are {REFUSED[int(codes[i])]}"
            self._ranking.refuse(self._requests.rules(name).policy, why)
        emptied = rows[died & (num_emptied > 0)]
        if died.all():
            return rows, victims, emptied
        return rows[died], victims.take(np.flatnonzero(died)), emptied

    # ------------------------------------------------------------ blocks without live tokens

    def drop_retained(self) -> list[int]:
        """Drop all-dead blocks that were retained while shared and no longer need to be.

        Returns them; they go back to the store after all plans.
        """
        freed: list[int] = []
        if not self._any_retained:
            return freed
        for request_id, request in self._requests.held.items():
            if request.retained_dead_blocks:
                table = self._requests.tables[request_id]
                dead = np.isin(table.block_ids(), list(request.retained_dead_blocks))
                freed += self._drop_dead_blocks(table, dead)
        self._any_retained = any(r.retained_dead_blocks for r in self._requests.held.values())
        self._note_reclaimed(freed)
        return freed

    def _note_reclaimed(self, freed: list[int]) -> None:
        num_blocks = self._requests.tables.pool.num_without_holder(freed)
        if num_blocks:
            self._current.counters.reclamation.reclaimed_blocks += num_blocks
            self._current.note(
                "reclaimed",
                f"{counted(num_blocks, 'all-dead block')} returned",
                {"blocks": num_blocks, "reason": "all dead"},
            )

    def _drop_dead_blocks(self, table: TokenTable, dead: Bools) -> list[int]:
        """Drop the blocks without live tokens where `dead` [num_blocks] is set.

        Returns those that left the table. Under `skip` the request retains shared ones.

            block table       A     B     C     D     E         a: live, .: dead or never written
            places         | a a | . . | . . | a . | a . |      B is shared, C is private
                                   |     |
              index, copy          |     +--> leaves the table, and the pool gets it back
                                   +--------> leaves the table, and its other holders keep it
              skip                 +--------> stays, until no other request holds it
            afterwards     | a a | a . | a . |                  D and E are at places 2 to 5
        """
        blocks = table.block_ids()
        shared = np.zeros_like(dead)
        shared[dead] = [self._store.is_shared(block) for block in blocks[dead].tolist()]
        request = self._requests.held[table.request_id]
        if request.retained_dead_blocks:
            request.retained_dead_blocks -= frozenset(blocks[dead].tolist())
        if shared.any() and keeps_dead_shared_blocks(self._active.config):
            request.retained_dead_blocks |= frozenset(blocks[shared].tolist())
            self._any_retained = True
            dead = dead & ~shared
        else:
            num_shared = int(np.count_nonzero(shared))
            self._current.counters.reclamation.shared_released_blocks += num_shared
        if not dead.any():
            return []
        dropped = self._requests.tables.drop_blocks(table, dead)
        self._current.decisions.blocks[table.row] = table.block_ids()
        self._store.remove(table.request_id, runs_of(dead))
        return dropped
