"""What an eviction is reported as: counters, one event, and who gave tokens for blocks.

Changes no table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Ints, Ragged
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.due import NEVER
from vtoken.core.runtime.given import GivenTally
from vtoken.core.runtime.requests import Requests
from vtoken.sentences import counted

NUM_NAMED = 3  # requests in an event, those that lost most


@dataclass(eq=False)
class Losses:
    """Reports what requests lose; `given`: the newest tokens that were given for blocks."""

    _requests: Requests
    _current: CurrentStep

    def __post_init__(self) -> None:
        self.given = GivenTally()

    def report(self, rows: Ints, victims: Ragged) -> None:
        """Count the `victims` of `rows` [k], which have died, and add their event."""
        counters, counts, num_tokens = self._current.counters, victims.counts, len(victims.values)
        num_given = self._note_given(rows, counts)
        counters.tokens.evicted += num_tokens
        counters.pressure.given_tokens += num_given
        counters.reclamation.moved_then_evicted_tokens += self._num_wasted(rows, victims)
        most = np.argsort(-counts, kind="stable")[:NUM_NAMED].tolist()
        largest = {self._requests.tables.names[rows[i]]: int(counts[i]) for i in most}
        policies = ", ".join(sorted(policy.name for policy in self._requests.by_policy(rows)))
        verb = "gave" if num_given == num_tokens else "lost"
        text = f"{counted(len(rows), 'request')} {verb} {counted(num_tokens, 'token')} ({policies})"
        if 0 < num_given < num_tokens:
            text += f", {num_given:,} of them for blocks that were short"
        named = ", ".join(f"{name} {count:,}" for name, count in largest.items())
        self._current.note(
            "eviction",
            f"{text}: {named}" + (", …" if len(rows) > NUM_NAMED else ""),
            {
                "requests": len(rows),
                "tokens": num_tokens,
                "given": num_given,
                "policy": policies,
                "largest": largest,
            },
        )

    def _note_given(self, rows: Ints, counts: Ints) -> int:
        """Note who gave tokens for blocks that were short: of `rows` [k], which lost `counts` [k]
        tokens. Returns how many they gave.
        """
        gave = np.flatnonzero(self._requests.due.floor[rows] < NEVER)
        for i in gave.tolist():
            request_id, count = self._requests.tables.names[rows[i]], int(counts[i])
            self._requests.held[request_id].given_tokens += count
            self.given.note(request_id, count)
        return int(counts[gave].sum())

    def _num_wasted(self, rows: Ints, victims: Ragged) -> int:
        """Those of the `victims` of `rows` [k] that were moved shortly before."""
        wasted = 0
        if not self._current.counters.reclamation.moved_tokens:
            return wasted
        for i, row in enumerate(rows.tolist()):
            moves = self._requests.held[self._requests.tables.names[row]].last_moves
            if moves is not None:
                wasted += moves.num_recent(victims.of(i), self._current.number)
        return wasted
