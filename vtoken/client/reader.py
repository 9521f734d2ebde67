"""What a stream has said: decodes its messages, holds their order, knows where to go on from.

Knows the wire, no sockets; both clients' streams are one of these around a websocket.

1. `seq` rises by one a message on one connection; a break raises StreamGap, never passes unseen.
2. `place` is the newest event that was seen: a connection that resumes from it misses none, or its
   `hello` says that it has not resumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from vtoken import wire
from vtoken.client.answers import refusal
from vtoken.client.errors import NotVToken, ProblemError, StreamClosed, StreamGap, Unauthorized
from vtoken.client.server import Server

Topic: TypeAlias = Literal["blocks", "requests", "events", "metrics"]
Format: TypeAlias = Literal["json", "msgpack"]

ALL_TOPICS: tuple[Topic, ...] = ("blocks", "requests", "events", "metrics")
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # wait after the n-th failure in a row; the last repeats
CLOSE_CODE_BASE = 4000  # the server closes a refused stream with 4000 + HTTP status

# What both websocket connections are opened with.
CONNECT: dict[str, Any] = {
    "compression": None,
    "max_size": None,
    "open_timeout": 10.0,
    "close_timeout": 1.0,
    "ping_interval": 5.0,
    "ping_timeout": 10.0,
}


def backoff_s(failures: int) -> float:
    """Seconds to wait after the `failures`-th failure in a row."""
    return BACKOFF_S[min(max(failures, 1), len(BACKOFF_S)) - 1]


class Reader:
    """The part of a stream that no socket changes; `raw` is the newest message as it came."""

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
        self._query = {"topics": ",".join(topics), "fps": f"{fps:g}", "format": format}
        kinds = msgspec.json if format == "json" else msgspec.msgpack
        self._decode: Callable[[Any], wire.StreamMessage] = kinds.Decoder(wire.StreamMessage).decode
        self._failures = 0
        self._ever_open = False
        self._seq: int | None = None

    def _address(self) -> str:
        resume = {} if self.place is None else {"resume": self.place}
        return self.server.stream_url(self._query | resume)

    def _opened(self) -> None:
        self._seq = None
        self._ever_open = True

    def _take(self, raw: str | bytes) -> wire.StreamMessage:
        """The message, once it is the next one."""
        self.raw = raw
        self.received_bytes += len(raw)
        try:
            message = self._decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise NotVToken.of(f"a message is not what the schema says: {error}") from error
        if isinstance(message, wire.Hello) and message.schema != wire.SCHEMA_VERSION:
            raise NotVToken.of(
                f"{self.server.url} speaks schema {message.schema} (vToken "
                f"{message.vtoken_version}), this client schema {wire.SCHEMA_VERSION}: "
                "bring both to one version"
            )
        if self._seq is not None and message.seq != self._seq + 1:
            raise StreamGap.of(f"expected message {self._seq + 1}, found {message.seq}")
        self._seq, self._failures = message.seq, 0
        if isinstance(message, wire.EventMessage):
            self.place = f"{message.epoch}:{message.event.seq}"
        elif isinstance(message, wire.Hello) and not message.resumed and self.place is not None:
            self.place = None  # the events in between are lost: what comes counts anew
        return message

    def _wait_s(self, error: ProblemError) -> float:
        """Seconds until the next try; raises `error` where none is wanted, or of any use."""
        if not self.reconnect or not self._ever_open or _lasts(error):
            raise error
        self._failures += 1
        return backoff_s(self._failures) * _spread()


def _lasts(error: ProblemError) -> bool:
    """Whether the next try would end as this one did."""
    status = error.problem.status
    return (400 <= status < 500 and status != 429) or (
        isinstance(error, NotVToken) and status < 500
    )


def refused(server: Server, response: Any) -> ProblemError:
    """The error of a handshake that was answered with an HTTP status."""
    return refusal(
        server,
        response.status_code,
        response.headers.get("Content-Type"),
        bytes(response.body or b""),
    )


def broken(server: Server, closed: Any) -> ProblemError:
    """The error of a connection that was closed; `closed` is websockets' ConnectionClosed."""
    if closed.rcvd is None:
        return StreamClosed.of("the stream has ended: connection lost")
    status, reason = closed.rcvd.code - CLOSE_CODE_BASE, closed.rcvd.reason
    if status == 401:
        return Unauthorized.of(reason or f"{server.url} wants a token", status=status)
    detail = f"the stream has ended: {reason or 'the server closed it'}"
    return StreamClosed.of(detail, status=max(0, status))


def _spread() -> float:
    """So that clients that lost the same server do not all return in one moment."""
    return random.uniform(0.9, 1.1)
