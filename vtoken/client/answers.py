"""Decoding of HTTP responses: the document, or the error to raise. Imports no HTTP library."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken.client.calls import Call
from vtoken.client.errors import (
    NotVToken,
    OutcomeUnknown,
    ProblemError,
    Unauthorized,
    Unreachable,
)
from vtoken.client.server import PREFIX, Server

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

# The texts of httpx and websockets for ECONNREFUSED.
_REFUSED = ("Connection refused", "Connect call failed", "All connection attempts failed")
PROBLEM_JSON = "application/problem+json"
_problems: Decoder[wire.Problem] = Decoder(wire.Problem)


def answer(
    server: Server, call: Call[T], status: int, content_type: str | None, content: bytes
) -> T:
    """The document of a successful response; raises ProblemError."""
    if not 200 <= status < 300:
        raise refusal(server, status, content_type, content)
    try:
        return call.decode(content)
    except ValueError as error:  # MalformedError, or octets that are no array
        raise NotVToken.of(
            f"{call.method} {server.call_url(call.path)}: the answer does not fit the schema: "
            f"{error}",
            status=status,
        ) from error


def unreachable(server: Server, error: Exception) -> Unreachable:
    """The error for a connection that failed before the answer."""
    reason = str(error) or type(error).__name__
    if any(text in reason for text in _REFUSED):
        reason = "connection refused; no server listens there"
    elif isinstance(error, TimeoutError):
        reason = "no answer in time"
    return Unreachable.of(f"cannot reach {server.url}: {reason}")


def no_answer(
    server: Server, call: Call[T], error: httpx.HTTPError, timeout_s: float
) -> Unreachable:
    """The error for a call without a complete answer; OutcomeUnknown if it may have changed
    something.
    """
    import httpx

    if isinstance(error, httpx.TimeoutException):
        failed = Unreachable.of(f"no answer from {server.url} within {timeout_s:g} s")
    else:
        failed = unreachable(server, error)
    never_sent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
    if call.change_id is None or isinstance(error, never_sent):
        return failed
    detail = f"{failed.problem.detail}; the change {call.change_id} may have been applied"
    title = OutcomeUnknown.title
    return OutcomeUnknown(wire.Problem(status=0, title=title, detail=detail, change=call.change_id))


def refusal(server: Server, status: int, content_type: str | None, content: bytes) -> ProblemError:
    """The error for a response with an error status."""
    kind = Unauthorized if status == HTTPStatus.UNAUTHORIZED else ProblemError
    if (content_type or "").partition(";")[0].strip() == PROBLEM_JSON:
        with contextlib.suppress(MalformedError):
            problem = _problems.decode(content)
            return OutcomeUnknown(problem) if problem.change is not None else kind(problem)
    if status == HTTPStatus.NOT_FOUND:
        detail = f"{server.url} answers, but has no {PREFIX}: vToken is not enabled there"
        return NotVToken.of(detail, status=status)
    if status == HTTPStatus.UNAUTHORIZED:
        return kind.of(f"{server.url} needs a token", status=status)
    return NotVToken.of(f"{server.url} answers with HTTP status {status}", status=status)
