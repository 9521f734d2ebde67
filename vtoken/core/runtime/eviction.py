"""Eviction: which tokens die now, and which blocks become empty.

Independent of relocation and of the engine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Bools, Ints, Ragged
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.sharing import keeps_dead_shared_blocks
from vtoken.core.runtime.due import phases
from vtoken.core.runtime.kernels import NEVER, is_due
from vtoken.core.runtime.policy_runner import PolicyRunner
from vtoken.core.runtime.shortage import Shortage, ShortageMonitor
from vtoken.core.runtime.state import RuntimeState
from vtoken.core.tables import kernels
from vtoken.core.tables.token_table import TokenTable
from vtoken.policies import Policy
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
NUM_NAMED = 3  # requests in an event, those that lost most


class Evictor:
    """Applies the configured policy to the tables of one runtime."""

    def __init__(
        self, state: RuntimeState, policy_runner: PolicyRunner, shortages: ShortageMonitor
    ) -> None:
        self._state = state
        self._shortages = shortages
        self._policy_runner = policy_runner
        self._any_retained = False  # whether some request may retain dead blocks

    def is_due(self, table: TokenTable, config: VTokenConfig) -> bool:
        """Whether `config` would evict from `table` before its next tokens are computed."""
        return self._is_longer(table, *phases(self._state.rules(table.request_id, config)))

    def may_give(self, table: TokenTable, rules: VTokenConfig) -> bool:
        """Whether a request of these `rules` may give tokens before its next ones are computed."""
        return rules.gives and self._is_longer(table, rules.budget_tokens, *phases(rules)[1:])

    def _is_longer(self, table: TokenTable, limit: int, in_prefill: bool, in_decode: bool) -> bool:
        due, row = self._state.due, table.row
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

    def evict_due(self, ready: list[str], shortage: Shortage) -> Evicted:
        """Evict what is due among `ready`, and what they give for `shortage`."""
        state, tables = self._state, self._state.tables
        rows = tables.rows_of(ready)
        if self._policy_runner.profiles():
            for row in rows.tolist():
                self._policy_runner.take_profiles(tables.at(row))
        due = self._not_moved(state.due.select(rows, tables.columns))
        if shortage.blocks:
            able = state.due.select(rows, tables.columns, gives=True)
            least = self._policy_runner.least
            due = np.append(due, self._shortages.share(able, least, shortage))
        if len(due) == 0:
            return NOTHING_DIED
        return self._evict(*self.choose(due))

    def _not_moved(self, rows: Ints) -> Ints:
        """Those of the due `rows` that this step has not relocated; the others stay due.

        The worker evicts before it moves, so a relocated token dies in a later step.
        """
        state = self._state
        if not state.draft.moved:
            return rows
        moved = np.isin(rows, list(state.draft.moved))
        late = rows[moved]
        state.due.waits[late] |= state.left_of_prompts(late) == 0
        return rows[~moved]

    def choose(self, rows: Ints) -> tuple[Ints, Ragged]:
        """The due `rows` [k] whose policy can choose, and their victims."""
        state, runner = self._state, self._policy_runner
        asked = [runner.victims(policy, own) for policy, own in self._by_policy(rows).items()]
        (chosen, victims), *others = asked
        for able, found in others:
            chosen, victims = np.append(chosen, able), victims.followed_by(found)
        if len(chosen) < len(rows):
            late = np.setdiff1d(rows, chosen)
            state.due.waits[late] |= state.left_of_prompts(late) == 0
        runner.compare(chosen, victims)
        return chosen, victims

    def _by_policy(self, rows: Ints) -> dict[Policy, Ints]:
        """The `rows` [k] of each policy."""
        state = self._state
        if not state.own_policies:
            return {state.config.policy: rows}
        found: dict[Policy, list[int]] = {}
        for row in rows.tolist():
            found.setdefault(state.rules(state.tables.names[row]).policy, []).append(row)
        return {policy: np.array(own) for policy, own in found.items()}

    def _evict(self, rows: Ints, victims: Ragged) -> Evicted:
        if len(rows) == 0:
            return NOTHING_DIED
        died, emptied = self._apply(rows, victims)
        if not died.all():
            rows, victims = rows[died], victims.take(np.flatnonzero(died))
        if len(victims.values) == 0:
            return NOTHING_DIED
        self._count(rows, victims, self._note_given(rows, victims.counts))
        freed: list[int] = []
        for row in emptied.tolist():
            table = self._state.tables.at(row)
            freed += self._drop_dead_blocks(table, table.block_live() == 0)
        self._note_reclaimed(freed)
        return Evicted(True, freed)

    def _apply(self, rows: Ints, victims: Ragged) -> tuple[Bools, Ints]:
        """Mark the victims of `rows` [k] dead. Returns where they died [k], and the rows of which a
        block has no live token any more. A policy whose victims are refused is not asked again.
        """
        state, tables, due = self._state, self._state.tables, self._state.due
        due.waits[rows] = False
        for row in rows[tables.columns.virtual[rows] == 0].tolist():
            state.begin_evicting(tables.at(row))
        num_due = tables.columns.num_live[rows] - due.target[rows]
        codes, num_emptied = tables.evict(rows, victims, num_due, due.protected(rows))
        died = codes == kernels.DONE
        state.draft.evict(rows if died.all() else np.where(died, rows, -1), victims)
        for i in np.flatnonzero(~died).tolist():
            name = tables.names[rows[i]]
            why = REFUSED[int(codes[i])]
            self._policy_runner.refuse(state.rules(name).policy, f"victims of {name} are {why}")
        return died, rows[died & (num_emptied > 0)]

    def _note_given(self, rows: Ints, counts: Ints) -> int:
        """Note who gave tokens for blocks that were short: of `rows` [k], which lost `counts` [k]
        tokens. Returns how many they gave.
        """
        state = self._state
        gave = np.flatnonzero(state.due.floor[rows] < NEVER)
        for i in gave.tolist():
            request_id, count = state.tables.names[rows[i]], int(counts[i])
            state.requests[request_id].given_tokens += count
            state.given.note(request_id, count)
        return int(counts[gave].sum())

    def _count(self, rows: Ints, victims: Ragged, num_given: int) -> None:
        """Count the dead `victims` of `rows` [k] and report them, the largest losses by name."""
        state, counts = self._state, victims.counts
        num_tokens = len(victims.values)
        state.counters.tokens.evicted += num_tokens
        state.counters.pressure.given_tokens += num_given
        if state.last_moves:
            wasted = self._num_wasted(rows, victims)
            state.counters.reclamation.moved_then_evicted_tokens += wasted
        most = np.argsort(-counts, kind="stable")[:NUM_NAMED]
        largest = {state.tables.names[rows[i]]: int(counts[i]) for i in most.tolist()}
        policies = ", ".join(sorted(policy.name for policy in self._by_policy(rows)))
        verb = "gave" if num_given == num_tokens else "lost"
        text = f"{counted(len(rows), 'request')} {verb} {counted(num_tokens, 'token')} ({policies})"
        if 0 < num_given < num_tokens:
            text += f", {num_given:,} of them for blocks that were short"
        names = ", ".join(f"{name} {count:,}" for name, count in largest.items())
        state.events.add(
            state.step,
            "eviction",
            f"{text}: {names}" + (", …" if len(rows) > NUM_NAMED else ""),
            {
                "requests": len(rows),
                "tokens": num_tokens,
                "given": num_given,
                "policy": policies,
                "largest": largest,
            },
        )

    def _num_wasted(self, rows: Ints, victims: Ragged) -> int:
        """Those of the `victims` of `rows` [k] that were moved shortly before."""
        state, wasted = self._state, 0
        for i, row in enumerate(rows.tolist()):
            moves = state.last_moves.get(state.tables.names[row])
            if moves is not None:
                wasted += moves.num_recent(victims.of(i), state.step)
        return wasted

    def drop_retained(self) -> list[int]:
        """Drop all-dead blocks that were retained while shared and no longer need to be.

        Returns them; they go back to the store after all plans.
        """
        freed: list[int] = []
        if not self._any_retained:
            return freed
        for request_id, request in self._state.requests.items():
            if request.retained_dead_blocks:
                table = self._state.tables[request_id]
                dead = np.isin(table.block_ids(), list(request.retained_dead_blocks))
                freed += self._drop_dead_blocks(table, dead)
        self._any_retained = any(r.retained_dead_blocks for r in self._state.requests.values())
        self._note_reclaimed(freed)
        return freed

    def _note_reclaimed(self, freed: list[int]) -> None:
        num_blocks = self._state.tables.pool.num_without_holder(freed)
        if num_blocks:
            self._state.counters.reclamation.reclaimed_blocks += num_blocks
            self._state.events.add(
                self._state.step,
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
        state = self._state
        blocks = table.block_ids()
        shared = np.zeros_like(dead)
        shared[dead] = [state.store.is_shared(block) for block in blocks[dead].tolist()]
        request = state.requests[table.request_id]
        if request.retained_dead_blocks:
            request.retained_dead_blocks -= frozenset(blocks[dead].tolist())
        if shared.any() and keeps_dead_shared_blocks(state.config):
            request.retained_dead_blocks |= frozenset(blocks[shared].tolist())
            self._any_retained = True
            dead = dead & ~shared
        else:
            state.counters.reclamation.shared_released_blocks += int(np.count_nonzero(shared))
        return state.drop_blocks(table, dead) if dead.any() else []
