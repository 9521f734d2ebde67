"""The stream of one server: its messages in order, and where to resume after a loss.

1. On one connection `seq` rises by one with every message; a gap raises StreamGap.
2. `place` is the newest event seen. A connection that resumes from it misses no event, or
   `resumed` in its `hello` is false.

websockets is imported on first use.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken.client.answers import refusal, token_ignored, unauthorized, unreachable
from vtoken.client.errors import NotVToken, ProblemError, StreamClosed, StreamGap
from vtoken.client.server import Server

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Topic: TypeAlias = Literal["blocks", "requests", "events", "metrics"]
Format: TypeAlias = Literal["json", "msgpack"]

ALL_TOPICS: tuple[Topic, ...] = ("blocks", "requests", "events", "metrics")
OPEN_S = 10.0  # the longest wait for a connection
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # wait after the n-th consecutive failure; the last repeats
CLOSE_CODE_BASE = 4000  # the server closes a refused stream with 4000 + HTTP status


def backoff_s(failures: int) -> float:
    """Seconds to wait after the `failures`-th consecutive failure."""
    return BACKOFF_S[min(max(failures, 1), len(BACKOFF_S)) - 1]


class AsyncStream:
    """Iterate over it with `async for`; `aclose`, or the end of `async with`, closes it.

    `raw` is the newest message as received, `place` EPOCH:SEQ of the newest event seen.
    """

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
        self.token_ignored = False  # by the server of the newest connection
        self._query = {"topics": ",".join(topics), "fps": f"{fps:g}", "format": format}
        self._decoder: Decoder[wire.StreamMessage] = Decoder(wire.StreamMessage, format)
        self._failures = 0
        self._ever_open = False
        self._seq: int | None = None
        self._closed = False
        self._socket: ClientConnection | None = None

    def _take(self, raw: str | bytes) -> wire.StreamMessage:
        """Decode a message and check that it is the next one; raises NotVToken, StreamGap."""
        self.raw = raw
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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> wire.StreamMessage:
        while not self._closed:
            try:
                return self._take(await self._receive())
            except ProblemError as error:
                await self._disconnect()
                if self._closed:
                    break
                await asyncio.sleep(self._wait_s(error))
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the stream; the iteration ends."""
        self._closed = True
        await self._disconnect()

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            try:
                await socket.close()
            except asyncio.CancelledError:  # the handshake is cut short: websockets leaves it open
                socket.transport.abort()
                raise

    async def _receive(self) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            self._socket = await self._connect()
            self._seq, self._ever_open = None, True
        try:
            return await self._socket.recv()
        except ConnectionClosed as closed:
            raise _broken(self.server, closed) from closed

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        resume = {} if self.place is None else {"resume": self.place}
        url = self.server.stream_url(self._query | resume)
        try:
            socket = await connect(url, **_options(self.server))
        except InvalidStatus as invalid:
            raise _refused(self.server, invalid.response) from invalid
        except (OSError, WebSocketException) as error:
            raise unreachable(self.server, error) from error
        self.token_ignored = socket.response is not None and token_ignored(socket.response.headers)
        if self.server.token is None:
            await socket.send("{}")  # a server that needs a token refuses at once: none will come
        return socket


class Stream:
    """Iterate over it; `close` may be called from another thread and ends the iteration.

    It is an `AsyncStream` in the event loop of a thread that lives from the first message to
    `close`. That thread alone uses the connection: two may not use one of TLS at once.
    """

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop  # of the thread
        self._end: asyncio.Event
        self._reading: asyncio.Task[wire.StreamMessage] | None = None

    @property
    def raw(self) -> str | bytes:
        """The newest message as received."""
        return self._stream.raw

    @property
    def place(self) -> str | None:
        """EPOCH:SEQ of the newest event seen."""
        return self._stream.place

    @property
    def token_ignored(self) -> bool:
        """Whether the server of the newest connection ignored the token."""
        return self._stream.token_ignored

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> wire.StreamMessage:
        with self._lock:
            if self._closed:
                raise StopIteration
            if self._thread is None:
                self._start()
            message = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            return message.result()
        except (CancelledError, StopAsyncIteration):
            raise StopIteration from None
        finally:
            message.cancel()  # if the wait was interrupted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream; the iteration ends."""
        with self._lock:
            if not self._closed and self._thread is not None:
                self._loop.call_soon_threadsafe(self._end.set)
            self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="vtoken stream", daemon=True
        )
        self._thread.start()
        started.result()

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        started.set_result(None)
        await self._end.wait()
        if self._reading is not None:  # it may be connecting, or waiting to reconnect
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._stream.aclose()

    async def _read(self) -> wire.StreamMessage:
        self._reading = asyncio.current_task()
        return await anext(self._stream)


def _options(server: Server) -> dict[str, Any]:
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


def _is_permanent(error: ProblemError) -> bool:
    """Whether another attempt would fail in the same way."""
    status = error.problem.status
    return (400 <= status < 500 and status != 429) or (
        isinstance(error, NotVToken) and status < 500
    )


def _refused(server: Server, response: Any) -> ProblemError:
    """The error for a handshake that the server answered with an HTTP status."""
    return refusal(
        server,
        response.status_code,
        response.headers.get("Content-Type"),
        bytes(response.body or b""),
    )


def _broken(server: Server, closed: Any) -> ProblemError:
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
