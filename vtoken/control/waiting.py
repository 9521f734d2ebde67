"""Rows of requests that hold no block: those that wait for their first step, or to run again.

Knows the engine's queue as a protocol. Such a request has no token table, so its row is zeros but
for its length and its rules. At most `MAX_WAITING_ROWS` of the queue get a row, those that are
admitted first: rows are made for every frame, and a queue may be of thousands. How many wait in all
is told by `Status.requests.waiting`; a request that is further behind is found by its id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vtoken.runtime.runtime import Runtime
from vtoken.wire import RequestRow

MAX_WAITING_ROWS = 64


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """`preempted`: it ran before. `num_output_tokens`: sampled until then."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    preempted: bool = False


class WaitingQueue(Protocol):
    """Requests that the engine has not admitted, or not again."""

    def first(self, limit: int) -> Iterable[QueuedRequest]:
        """Up to `limit` of them, in the order in which they are admitted."""

    def find(self, request_id: str) -> QueuedRequest | None:
        """The one of this id, wherever it stands; None when none waits."""


class NobodyWaits:
    """The queue of an engine that admits everybody at once."""

    def first(self, limit: int) -> Iterable[QueuedRequest]:
        del limit
        return ()

    def find(self, request_id: str) -> QueuedRequest | None:
        del request_id
        return None


def waiting_row(runtime: Runtime, queued: QueuedRequest) -> RequestRow:
    """The row of one request of the queue."""
    rules = runtime.state.rules(queued.request_id)
    row = RequestRow(
        id=queued.request_id,
        state="preempted" if queued.preempted else "waiting",
        live=0,
        dead=0,
        prompt_tokens=queued.num_prompt_tokens,
        output_tokens=queued.num_output_tokens,
        blocks=0,
        bound_blocks=0,
        naive_blocks=0,
        policy=rules.policy.name,
        budget_tokens=rules.budget_tokens,
        dense=True,
    )
    row.preemptions = runtime.counters.preempted_per_request.get(queued.request_id, 0)
    return row
