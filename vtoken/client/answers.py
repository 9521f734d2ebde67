"""What a server's answer means: a document, or the error to raise.

Knows HTTP statuses, headers and bodies as values, and no library that brings them.
"""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TypeVar

import msgspec

from vtoken import wire
from vtoken.client.calls import Call
from vtoken.client.errors import NotVToken, ProblemError, Unauthorized, Unreachable
from vtoken.client.server import PREFIX, Server

T = TypeVar("T")

# How the libraries put ECONNREFUSED.
_REFUSED = ("Connection refused", "Connect call failed", "All connection attempts failed")
PROBLEM_JSON = "application/problem+json"


def answer(
    server: Server, call: Call[T], status: int, content_type: str | None, content: bytes
) -> T:
    """The document of a good answer; raises ProblemError."""
    if not 200 <= status < 300:
        raise refusal(server, status, content_type, content)
    try:
        return call.decode(content)
    except (msgspec.MsgspecError, ValueError) as error:
        raise NotVToken.of(
            f"{call.method} {server.call_url(call.path)}: not what the schema says: {error}",
            status=status,
        ) from error


def unreachable(server: Server, error: Exception) -> Unreachable:
    """The error of a connection that could not be made, or broke before the answer."""
    why = str(error) or type(error).__name__
    if any(text in why for text in _REFUSED):
        why = "nothing listens there (connection refused)"
    elif isinstance(error, TimeoutError):
        why = "no answer in time"
    return Unreachable.of(f"cannot reach {server.url}: {why}")


def refusal(server: Server, status: int, content_type: str | None, content: bytes) -> ProblemError:
    """The error that a refusing answer stands for."""
    kind = Unauthorized if status == HTTPStatus.UNAUTHORIZED else ProblemError
    if (content_type or "").partition(";")[0].strip() == PROBLEM_JSON:
        with contextlib.suppress(msgspec.MsgspecError):
            return kind(msgspec.json.decode(content, type=wire.Problem))
    if status == HTTPStatus.NOT_FOUND:
        detail = f"{server.url} answers, but has no {PREFIX}: vToken is not on there"
        return NotVToken.of(detail, status=status)
    if status == HTTPStatus.UNAUTHORIZED:
        return kind.of(f"{server.url} wants a token", status=status)
    return NotVToken.of(f"{server.url} answers with HTTP status {status}", status=status)
