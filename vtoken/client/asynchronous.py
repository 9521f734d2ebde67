"""The asyncio client: the methods of `Client`, to be awaited.

httpx and websockets are imported on first use. `calls` defines the calls, `answers` decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from vtoken import wire
from vtoken.client import calls, request_text, sequences
from vtoken.client.answers import answer, http_options, no_answer, token_ignored, unreachable
from vtoken.client.calls import Call
from vtoken.client.errors import OutcomeUnknown, ProblemError
from vtoken.client.methods import as_method
from vtoken.client.outcome import looked_up
from vtoken.client.reader import ALL_TOPICS, Format, Reader, Topic, broken, refused, stream_options
from vtoken.client.sequences import Pages, Steps
from vtoken.client.server import TIMEOUT_S, Server

if TYPE_CHECKING:
    import httpx
    from websockets.asyncio.client import ClientConnection

P = ParamSpec("P")
T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


def _sent(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaited[T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(make(*args, **kwargs))

    return as_method(method, make)


def _run(make: Callable[P, Steps[T]]) -> Callable[Concatenate[AsyncClient, P], Awaited[T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._drive(make(*args, **kwargs))

    return as_method(method, make)


def _paged(make: Callable[P, Pages[T]]) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._iterate(make(*args, **kwargs))

    return as_method(method, make)


class AsyncClient:
    """One server. Every method raises ProblemError; a refused call has changed nothing. Whether a
    change without an answer was applied is looked up for `lookup_s` seconds, after a call of
    `on_lookup`; by default OutcomeUnknown is raised at once.

    `server`: its address, a `Server` with a token, or None for VTOKEN_URL and VTOKEN_TOKEN of the
    environment.
    """

    def __init__(
        self,
        server: Server | str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        lookup_s: float = 0.0,
        on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None,
    ) -> None:
        if server is None:
            server = Server.from_environment()
        self.server = Server(server) if isinstance(server, str) else server
        self.timeout_s = timeout_s
        self.lookup_s = lookup_s
        self.on_lookup = on_lookup
        self.token_ignored = False  # by the newest answer
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    status = _sent(calls.status)
    config = _sent(calls.config)
    patch_config = _sent(calls.patch_config)
    confirm = _sent(calls.confirm)
    undo = _sent(calls.undo)
    policies = _sent(calls.policies)
    compact = _sent(calls.compact)
    forget = _sent(calls.forget)
    end = _sent(calls.end)
    operation = _sent(calls.operation)
    wait_operation = _run(sequences.wait_operation)
    change = _sent(calls.change)
    wait_change = _run(sequences.wait_change)
    blocks = _sent(calls.blocks)
    block_live = _sent(calls.block_live)
    block = _sent(calls.block)
    requests = _sent(calls.requests)
    request = _sent(calls.request)
    tokens = _sent(calls.tokens)
    token_pages = _paged(sequences.token_pages)
    text = _sent(calls.text)
    refresh_text = _run(request_text.refresh_text)
    events = _sent(calls.events)
    newest_events = _run(sequences.newest_events)
    audit = _sent(calls.audit)
    engines = _sent(calls.engines)
    sync = _sent(calls.sync)
    recording = _sent(calls.recording)

    def stream(
        self,
        topics: Iterable[Topic] = ALL_TOPICS,
        *,
        fps: float = 10.0,
        format: Format = "msgpack",  # noqa: A002 - the query parameter's name
        resume: str | None = None,
        reconnect: bool = False,
    ) -> AsyncStream:
        """As `Client.stream`, for `async for`."""
        return AsyncStream(self.server, topics, fps, format, resume, reconnect)

    # ------------------------------------------------------------ transport

    async def send(self, call: Call[T]) -> T:
        """Send one call and return the decoded answer."""
        try:
            return await self._send(call)
        except OutcomeUnknown as lost:
            if not self.lookup_s:
                raise
            self.on_lookup(lost)
            found: T = await self._drive(looked_up(lost, self.lookup_s))
            return found

    async def _send(self, call: Call[T]) -> T:
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(**http_options(self.server, self.timeout_s))
        try:
            response = await self._http.request(
                call.method,
                self.server.call_url(call.path),
                params=call.query(self.server),
                headers=call.headers,
                content=call.content,
            )
        except httpx.HTTPError as error:
            raise no_answer(self.server, call, error, self.timeout_s) from error
        self.token_ignored = token_ignored(response.headers)
        content_type = response.headers.get("Content-Type")
        return answer(self.server, call, response.status_code, content_type, response.content)

    async def _drive(self, sequence: Steps[T]) -> T:
        answered: object = None
        failed: ProblemError | None = None
        while True:
            try:
                step = sequence.send(answered) if failed is None else sequence.throw(failed)
            except StopIteration as end:
                result: T = end.value
                return result
            answered = failed = None
            if isinstance(step, Call):
                try:
                    answered = await self.send(step)
                except ProblemError as error:
                    failed = error
            else:
                await asyncio.sleep(step)

    async def _iterate(self, pages: Pages[T]) -> AsyncIterator[T]:
        call = next(pages, None)
        while call is not None:
            page = await self.send(call)
            yield page
            try:
                call = pages.send(page)
            except StopIteration:
                return


class AsyncStream(Reader):
    """Iterate over it with `async for`; `aclose`, or the end of `async with`, closes it."""

    _socket: ClientConnection | None = None

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
            self._opened()
        try:
            return await self._socket.recv()
        except ConnectionClosed as closed:
            raise broken(self.server, closed) from closed

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException

        try:
            socket = await connect(self._address(), **stream_options(self.server))
        except InvalidStatus as invalid:
            raise refused(self.server, invalid.response) from invalid
        except (OSError, WebSocketException) as error:
            raise unreachable(self.server, error) from error
        self.token_ignored = socket.response is not None and token_ignored(socket.response.headers)
        return socket
