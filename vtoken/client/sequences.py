"""What takes several calls: waiting for an operation, the newest events, all pages of tokens.

Knows the calls, no sockets. Each is a generator of calls that is told the answers, so that the sync
and the async client run the same code.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from vtoken import wire
from vtoken.client import calls
from vtoken.client.calls import Call

T = TypeVar("T")

Pause: TypeAlias = float  # seconds until the sequence goes on
Steps: TypeAlias = Generator[Call[Any] | Pause, Any, T]  # sent: the answer; returned: the result
Pages: TypeAlias = Generator[Call[T], T, None]  # sent: the page that was asked for

POLL_S = (0.02, 0.5)  # shortest and longest wait between two looks at an operation
MAX_EVENTS = 1000  # the server's bounds of a page
MAX_TOKENS = 4096


def wait_operation(operation_id: str, *, timeout_s: float = 60.0) -> Steps[wire.Operation]:
    """The operation once it is over; after `timeout_s` as it is then, pending or running."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S[0]
    while True:
        operation: wire.Operation = yield calls.operation(operation_id)
        left_s = deadline - time.monotonic()
        if operation.state not in ("pending", "running") or left_s <= 0:
            return operation
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, POLL_S[1])


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
) -> Pages[wire.TokenPage]:
    """Every page of a request's token table; each is of one step, not all of the same."""
    while True:
        page = yield calls.tokens(request_id, start, limit)
        start = page.start + len(page.rows)
        if not page.rows or start >= page.total:
            return
