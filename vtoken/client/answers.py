"""Decoding of HTTP responses: the document, or the error to raise. Imports no HTTP library."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from msgspec import structs

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken.client.call import Call
from vtoken.client.errors import (
    NotVToken,
    OutcomeUnknown,
    ProblemError,
    TLSFailed,
    Unauthorized,
    Unreachable,
)
from vtoken.client.server import PREFIX, Server

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

# The texts of httpx and websockets for ECONNREFUSED.
_REFUSED = ("Connection refused", "Connect call failed", "All connection attempts failed")
# OpenSSL's for bytes that are no TLS, and X.509's for a name that is not in the certificate.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
_OTHER_NAME = (62, 64)
# The texts of httpx and websockets for a connection that ends before an answer.
_NO_HTTP = ("Server disconnected without", "did not receive a valid HTTP response")
TOKEN_HEADER = "X-VToken-Token"
PROBE_S = 1.0  # for a handshake with a server that ended a connection
PROBLEM_JSON = "application/problem+json"
_problems: Decoder[wire.Problem] = Decoder(wire.Problem)


def answer(server: Server, call: Call[T], response: httpx.Response) -> T:
    """The document of a successful response; raises ProblemError."""
    status = response.status_code
    if not response.is_success:
        raise refusal(server, status, response.headers.get("Content-Type"), response.content)
    try:
        return call.decode(response.content)
    except ValueError as error:  # MalformedError, or octets that are no array
        raise NotVToken.of(
            f"{call.route.method} {server.call_url(call.path)}: the answer does not fit the "
            f"schema: {error}",
            status=status,
        ) from error


def token_ignored(headers: Mapping[str, str]) -> bool:
    """Whether the server says that it has no tokens and did not check the one that it was sent."""
    return headers.get(TOKEN_HEADER) == "ignored"


def unreachable(server: Server, error: Exception) -> Unreachable:
    """The error for a connection that failed before the answer."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return TLSFailed.of(f"cannot reach {server.url}: {_tls_words(server, cause)}")
        cause = cause.__cause__ or cause.__context__
    reason = str(error) or type(error).__name__
    if any(text in reason for text in _REFUSED):
        reason = "connection refused; no server listens there"
    elif isinstance(error, TimeoutError):
        reason = "no answer in time"
    elif any(text in reason for text in _NO_HTTP) and _speaks_tls(server):
        https = f"https://{server.url.partition('://')[2]}"
        return TLSFailed.of(
            f"cannot reach {server.url}: the server uses TLS; its address is {https}"
        )
    return Unreachable.of(f"cannot reach {server.url}: {reason}")


def _speaks_tls(server: Server) -> bool:
    """Whether an http:// server would have to be called as https://."""
    parts = urlsplit(server.url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        with (
            socket.create_connection((parts.hostname or "", parts.port or 80), PROBE_S) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except OSError:
        return False


def _tls_words(server: Server, error: ssl.SSLError) -> str:
    """What failed, and the remedy."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message.rstrip(".")
        if error.verify_code in _OTHER_NAME:
            return f"{why}; call the server by a name of its certificate"
        return (
            f"its certificate is not trusted: {why}; name the file of the certificate, or of the "
            "authority that signed it, with --cafile or VTOKEN_CAFILE"
        )
    if error.reason in _NO_TLS:
        return (
            f"the server does not use TLS; its address is http://{server.url.partition('://')[2]}"
        )
    return f"TLS fails: {error.reason or error}"


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
    return OutcomeUnknown.of(detail, change=call.change_id)


def refusal(server: Server, status: int, content_type: str | None, content: bytes) -> ProblemError:
    """The error for a response with an error status."""
    if (content_type or "").partition(";")[0].strip() == PROBLEM_JSON:
        with contextlib.suppress(MalformedError):
            problem = _problems.decode(content)
            if status == HTTPStatus.UNAUTHORIZED:
                problem = structs.replace(problem, detail=_token_words(server))
                return Unauthorized(problem)
            return (OutcomeUnknown if problem.change is not None else ProblemError)(problem)
    if status == HTTPStatus.NOT_FOUND:
        detail = f"{server.url} answers, but has no {PREFIX}: vToken is not enabled there"
        return NotVToken.of(detail, status=status)
    if status == HTTPStatus.UNAUTHORIZED:
        return unauthorized(server)
    return NotVToken.of(f"{server.url} answers with HTTP status {status}", status=status)


def unauthorized(server: Server) -> Unauthorized:
    """The error for a missing or unknown token."""
    return Unauthorized.of(_token_words(server), status=HTTPStatus.UNAUTHORIZED)


def _token_words(server: Server) -> str:
    if server.token is None:
        return f"{server.url} needs a token: VTOKEN_TOKEN, or --token-file FILE"
    source = f" of {server.token_source}" if server.token_source else ""
    return f"{server.url} does not accept the token{source}"
