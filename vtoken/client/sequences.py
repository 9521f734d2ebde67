"""Operations of several calls: waiting for a compaction or for the outcome of a change, the newest
events, all pages of tokens.

Each is a generator that yields calls and is sent the answers or thrown the errors, so that the sync
and the async client share the code.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from vtoken import wire
from vtoken.client import calls
from vtoken.client.call import Steps
from vtoken.client.errors import NotApplied, OutcomeUnknown, ProblemError, Unreachable
from vtoken.wire.routes import MAX_EVENTS, MAX_TOKENS

T = TypeVar("T")

POLL_S = (0.02, 0.5)  # shortest and longest polling interval of an operation
RETRIED = (429, 503)  # what passes: too many calls, an engine that does not answer


def wait_operation(operation_id: str, *, timeout_s: float = 60.0) -> Steps[wire.Operation]:
    """Wait for the operation to end; after `timeout_s`, returns it pending or running."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S[0]
    while True:
        operation: wire.Operation = yield calls.operation(operation_id)
        left_s = deadline - time.monotonic()
        if operation.state not in ("pending", "running") or left_s <= 0:
            return operation
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, POLL_S[1])


def wait_change(change_id: str, *, timeout_s: float = 60.0) -> Steps[wire.Change]:
    """Wait until the engine tells what became of a change; raises OutcomeUnknown after `timeout_s`
    without an answer.
    """
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S[0]
    while True:
        try:
            change: wire.Change = yield calls.change(change_id)
            if change.state != "pending":
                return change
            detail = "it still waits for the engine"
        except ProblemError as error:
            if not (isinstance(error, Unreachable) or error.problem.status in RETRIED):
                raise
            detail = error.problem.detail
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise OutcomeUnknown.of(
                f"nobody told within {timeout_s:g} s whether the change {change_id} was applied: "
                f"{detail}; ask again: GET /vtoken/v1/changes/{change_id}",
                change=change_id,
            )
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, POLL_S[1])


def looked_up(lost: OutcomeUnknown, timeout_s: float) -> Steps[Any]:
    """The answer that was lost. Raises the ProblemError of a refused change, NotApplied, and
    OutcomeUnknown if nobody tells within `timeout_s`.
    """
    change: wire.Change = yield from wait_change(lost.change_id, timeout_s=timeout_s)
    if change.problem is not None:
        raise ProblemError(change.problem)
    if change.state == "not_applied":
        raise NotApplied.of(f"the change {change.id} did not reach the engine: nothing was changed")
    of_request = change.forgotten or change.ended or change.restored
    answer = change.result or change.operation or of_request
    if answer is None:
        raise lost
    if isinstance(answer, wire.PatchResult | wire.Forgotten | wire.Ended | wire.Restored):
        answer.notes.append(f"the answer was lost; change {change.id} was looked up: it is applied")
    return answer


def newest_events(limit: int = 100) -> Steps[list[wire.Event]]:
    """The newest `limit` events that the engine still holds, oldest first."""
    page: wire.EventPage = yield calls.events(limit=1)
    seq, newest = max(0, page.last_seq - limit), page.last_seq
    events: list[wire.Event] = []
    while seq < newest:
        page = yield calls.events(after=seq, limit=MAX_EVENTS)
        if not page.events:
            break
        events += page.events
        seq = events[-1].seq
    return events


def token_pages(
    request_id: str, *, start: int = 0, limit: int = MAX_TOKENS
) -> Steps[list[wire.TokenPage]]:
    """Every page of a request's token table; pages may be of different steps."""
    pages: list[wire.TokenPage] = []
    while True:
        page: wire.TokenPage = yield calls.tokens(request_id, start, limit)
        pages.append(page)
        start = page.start + len(page.rows)
        if not page.rows or start >= page.total:
            return pages
