"""What requests lose: reported at each eviction, tallied if it was given for blocks, and kept once
they have ended.

Changes no table.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vtoken.base.arrays import Ints, Ragged
from vtoken.base.request_ids import short_id
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.due import NEVER
from vtoken.core.runtime.requests import Requests
from vtoken.sentences import counted
from vtoken.wire import MAX_FINISHED, RequestDetail

WINDOW_S = 10.0
# Upper bounds of the shares of `FinishedLog.kept_shares`.
KEPT_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
REPORTED = (
    "live",
    "dead",
    "given_tokens",
    "restored_tokens",
    "preemptions",
    "policy",
    "budget_tokens",
    "asked_budget_tokens",
    "evict_when",
    "evict_during",
)
NUM_NAMED = 3  # requests in an event, those that lost most


class GivenTally:
    """The tokens given in the last `WINDOW_S` seconds, and by how many requests."""

    def __init__(self) -> None:
        self._given: deque[tuple[float, str, int]] = deque()

    def note(self, request_id: str, num_tokens: int) -> None:
        """`request_id` gave `num_tokens` now."""
        self._given.append((time.monotonic(), request_id, num_tokens))
        self._forget()

    def recent(self) -> tuple[int, int]:
        """Tokens, and requests that gave them."""
        self._forget()
        names = {request_id for _, request_id, _ in self._given}
        return sum(tokens for *_, tokens in self._given), len(names)

    def since_s(self) -> float:
        """Seconds since the newest token was given; `WINDOW_S` if none was within it."""
        self._forget()
        return time.monotonic() - self._given[-1][0] if self._given else WINDOW_S

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW_S
        while self._given and self._given[0][0] < oldest:
            self._given.popleft()


@dataclass(eq=False)
class Losses:
    """Reports what requests lose; `given`: the newest tokens that were given for blocks."""

    _requests: Requests
    _current: CurrentStep

    def __post_init__(self) -> None:
        self.given = GivenTally()

    def report(self, rows: Ints, victims: Ragged, num_parked: int) -> None:
        """Count the `victims` of `rows` [k], which have died, `num_parked` of them with a copy, and
        add their event.
        """
        counters, counts, num_tokens = self._current.counters, victims.counts, len(victims.values)
        num_given = self._note_given(rows, counts)
        counters.tokens.evicted += num_tokens
        counters.pressure.given_tokens += num_given
        counters.reclamation.moved_then_evicted_tokens += self._num_wasted(rows, victims)
        most = np.argsort(-counts, kind="stable")[:NUM_NAMED].tolist()
        largest = {self._requests.tables.names[rows[i]]: int(counts[i]) for i in most}
        policies = ", ".join(sorted(policy.name for policy in self._requests.by_policy(rows)))
        named = [short_id(name) for name in largest]
        who = named[0] if len(rows) == 1 else f"{len(rows):,} requests"
        verb = "gave" if num_given == num_tokens else "lost"
        text = f"{who} {verb} {counted(num_tokens, 'token')}"
        if 0 < num_given < num_tokens:
            text += f", {num_given:,} of them for blocks that were short"
        if len(rows) > 1:
            shares = zip(named, largest.values(), strict=True)
            text += ": " + ", ".join(f"{name} {count:,}" for name, count in shares)
        self._current.note(
            "eviction",
            text + (", …" if len(rows) > NUM_NAMED else ""),
            {
                "requests": len(rows),
                "tokens": num_tokens,
                "given": num_given,
                "parked": num_parked,
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


def kept_share(ended: RequestDetail) -> float:
    """The live share of all tokens."""
    num_tokens = ended.live + ended.dead
    return ended.live / num_tokens if num_tokens else 1.0


def answer_report(ended: RequestDetail) -> dict[str, Any]:
    """What the answer says of a request that has ended, JSON-compatible."""
    values = ((name, getattr(ended, name)) for name in REPORTED)
    return {name: value for name, value in values if value is not None}


@dataclass(slots=True)
class FinishedLog:
    """The newest `MAX_FINISHED` finished requests.

    `kept_shares`: how many of all kept at most each share of `KEPT_SHARES`, and more than the one
    before. `kept_sum`: the sum of their shares.
    """

    kept_shares: list[int] = field(default_factory=lambda: [0] * len(KEPT_SHARES))
    kept_sum: float = 0.0
    _newest: OrderedDict[str, RequestDetail] = field(default_factory=OrderedDict)

    def add(self, ended: RequestDetail) -> None:
        share = kept_share(ended)
        self.kept_sum += share
        self.kept_shares[bisect_left(KEPT_SHARES, share)] += 1
        self._newest.pop(ended.id, None)
        self._newest[ended.id] = ended
        if len(self._newest) > MAX_FINISHED:
            self._newest.popitem(last=False)

    def get(self, request_id: str) -> RequestDetail | None:
        return self._newest.get(request_id)

    def ids(self) -> Iterable[str]:
        """Those of the requests that `get` finds, oldest first."""
        return self._newest.keys()
