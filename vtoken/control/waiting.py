"""Rows of queued requests, which hold no block: new ones and preempted ones.

A queued request has no token table, so its row has only its lengths and its rules. Only the first
`MAX_WAITING_ROWS` in the order of admission get a row: rows are built for every frame, and a queue
may have thousands of requests. `Status.requests.waiting` counts all, and any of them can be looked
up by id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import RequestRow

MAX_WAITING_ROWS = 64


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request of the queue; `num_output_tokens` were sampled before it was preempted.

    `idle`: a session that waits for its client's next input.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    preempted: bool = False
    idle: bool = False


class WaitingQueue(Protocol):
    """Requests that wait to be admitted, or readmitted after a preemption."""

    def first(self, limit: int) -> Iterable[QueuedRequest]:
        """The first `limit` requests, in the order of admission."""

    def find(self, request_id: str) -> QueuedRequest | None:
        """The queued request of this id, at any position; None if it is not queued."""


class EmptyQueue:
    """The queue of an engine that admits every request at once."""

    def first(self, limit: int) -> Iterable[QueuedRequest]:
        del limit
        return ()

    def find(self, request_id: str) -> QueuedRequest | None:
        del request_id
        return None


def waiting_row(runtime: Runtime, queued: QueuedRequest) -> RequestRow:
    """The row of one queued request."""
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
        evict_when=rules.evict_when,
    )
    row.session = runtime.state.is_session(queued.request_id)
    row.preemptions = runtime.state.preempted.get(queued.request_id, 0)
    return row
