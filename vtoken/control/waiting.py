"""The queue of requests that hold no block: new ones, preempted ones, and sessions between turns.

Only the first `MAX_WAITING_ROWS` in the order of admission get a row: rows are built for every
frame, and a queue may have thousands of requests. `Status.requests.waiting` counts all, and any of
them can be looked up by id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vtoken.wire import RequestState

MAX_WAITING_ROWS = 64


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request of the queue; `num_output_tokens` were sampled before it was preempted."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    state: RequestState = "waiting"  # or "preempted", or "idle": a session


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
