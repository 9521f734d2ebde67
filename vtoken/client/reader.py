"""The protocol part of a stream: decodes messages, checks their order, tracks where to resume.

`AsyncStream` subclasses `Reader` and adds a websocket.

1. On one connection `seq` rises by one with every message; a gap raises StreamGap.
2. `place` is the newest event seen. A connection that resumes from it misses no event, or
   `resumed` in its `hello` is false.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken.client.answers import refusal, unauthorized
from vtoken.client.errors import NotVToken, ProblemError, StreamClosed, StreamGap
from vtoken.client.server import Server

Topic: TypeAlias = Literal["blocks", "requests", "events", "metrics"]
Format: TypeAlias = Literal["json", "msgpack"]

ALL_TOPICS: tuple[Topic, ...] = ("blocks", "requests", "events", "metrics")
OPEN_S = 10.0  # the longest wait for a connection
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # wait after the n-th consecutive failure; the last repeats
CLOSE_CODE_BASE = 4000  # the server closes a refused stream with 4000 + HTTP status


def stream_options(server: Server) -> dict[str, Any]:
    """Options of a stream's websocket connection."""
    return {
        "additional_headers": server.headers(),
        "proxy": None if server.is_loopback else True,
        "ssl": server.tls() if server.is_https else None,
        "compression": None,
        "max_size": None,
        "open_timeout": OPEN_S,
        "close_timeout": 1.0,
        "ping_interval": 5.0,
        "ping_timeout": 10.0,
    }


def backoff_s(failures: int) -> float:
    """Seconds to wait after the `failures`-th consecutive failure."""
    return BACKOFF_S[min(max(failures, 1), len(BACKOFF_S)) - 1]


class Reader:
    """The socket-independent part of a stream; `raw` is the newest message as received."""

    def __init__(
        self,
        server: Server,
        topics: Iterable[Topic],
        fps: float,
        format: Format,  # noqa: A002 - the query parameter's name
        resume: str | None,
        reconnect: bool,
    ) -> None:
        self.server = server
        self.reconnect = reconnect
        self.place = resume  # EPOCH:SEQ
        self.raw: str | bytes = b""
        self.received_bytes = 0
        self.token_ignored = False  # by the server of the newest connection
        self._query = {"topics": ",".join(topics), "fps": f"{fps:g}", "format": format}
        self._decoder: Decoder[wire.StreamMessage] = Decoder(wire.StreamMessage, format)
        self._failures = 0
        self._ever_open = False
        self._seq: int | None = None
        self._closed = False

    def _address(self) -> str:
        resume = {} if self.place is None else {"resume": self.place}
        return self.server.stream_url(self._query | resume)

    def _opened(self) -> None:
        self._seq = None
        self._ever_open = True

    def _take(self, raw: str | bytes) -> wire.StreamMessage:
        """Decode a message and check that it is the next one; raises NotVToken, StreamGap."""
        self.raw = raw
        self.received_bytes += len(raw)
        try:
            message = self._decoder.decode(raw)
        except MalformedError as error:
            raise NotVToken.of(f"a message does not fit the schema: {error}") from error
        if isinstance(message, wire.Hello) and message.schema != wire.SCHEMA_VERSION:
            raise NotVToken.of(
                f"{self.server.url} uses schema {message.schema} (vToken "
                f"{message.vtoken_version}), this client schema {wire.SCHEMA_VERSION}: "
                "install the same version of vToken on both"
            )
        if self._seq is not None and message.seq != self._seq + 1:
            raise StreamGap.of(f"expected message {self._seq + 1}, received {message.seq}")
        self._seq, self._failures = message.seq, 0
        if isinstance(message, wire.EventMessage):
            self.place = f"{message.epoch}:{message.event.seq}"
        elif isinstance(message, wire.Hello) and not message.resumed and self.place is not None:
            self.place = None  # the events in between are lost
        return message

    def _wait_s(self, error: ProblemError) -> float:
        """Seconds until the next attempt; raises `error` if there is to be none."""
        if not self.reconnect or not self._ever_open or _is_permanent(error):
            raise error
        self._failures += 1
        return backoff_s(self._failures) * _jitter()


def _is_permanent(error: ProblemError) -> bool:
    """Whether another attempt would fail in the same way."""
    status = error.problem.status
    return (400 <= status < 500 and status != 429) or (
        isinstance(error, NotVToken) and status < 500
    )


def refused(server: Server, response: Any) -> ProblemError:
    """The error for a handshake that the server answered with an HTTP status."""
    return refusal(
        server,
        response.status_code,
        response.headers.get("Content-Type"),
        bytes(response.body or b""),
    )


def broken(server: Server, closed: Any) -> ProblemError:
    """The error for a closed connection; `closed` is websockets' ConnectionClosed."""
    if closed.rcvd is None:
        return StreamClosed.of("the stream ended: connection lost")
    status, reason = closed.rcvd.code - CLOSE_CODE_BASE, closed.rcvd.reason
    if status == 401:
        return unauthorized(server)
    detail = f"the stream ended: {reason or 'the server closed it'}"
    return StreamClosed.of(detail, status=max(0, status))


def _jitter() -> float:
    """A random factor, so that clients that lost the same server do not reconnect all at once."""
    return random.uniform(0.9, 1.1)
