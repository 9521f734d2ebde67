"""The synchronous client: every call as a method that returns the wire document.

httpx and websockets are imported on first use. `calls` defines the calls, `answers` decodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

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
    from websockets.sync.client import ClientConnection

P = ParamSpec("P")
T = TypeVar("T")


def _sent(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(make(*args, **kwargs))

    return as_method(method, make)


def _run(make: Callable[P, Steps[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._drive(make(*args, **kwargs))

    return as_method(method, make)


def _paged(make: Callable[P, Pages[T]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(make(*args, **kwargs))

    return as_method(method, make)


class Client:
    """One server. Every method raises ProblemError; a refused call has changed nothing. Whether a
    change without an answer was applied is looked up for `lookup_s` seconds, after a call of
    `on_lookup`; by default OutcomeUnknown is raised at once.

    `server`: its address, a `Server` with a token, or None for VTOKEN_URL and VTOKEN_TOKEN of the
    environment. A client is thread-safe.
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
        self._http: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._http is not None:
            self._http.close()
            self._http = None

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
    ) -> Stream:
        """Iterate over messages, at most `fps` states a second; connects on the first one.

        `resume`: EPOCH:SEQ of the last event seen, see `Stream.place`. `reconnect`: reconnect after
        a loss and resume there. Every connection begins with a `hello`, whose `resumed` is true if
        no event was missed, and a `snapshot`. Without `reconnect`, a loss raises StreamClosed.
        """
        return Stream(self.server, topics, fps, format, resume, reconnect)

    # ------------------------------------------------------------ transport

    def send(self, call: Call[T]) -> T:
        """Send one call and return the decoded answer."""
        try:
            return self._send(call)
        except OutcomeUnknown as lost:
            if not self.lookup_s:
                raise
            self.on_lookup(lost)
            found: T = self._drive(looked_up(lost, self.lookup_s))
            return found

    def _send(self, call: Call[T]) -> T:
        import httpx

        if self._http is None:
            self._http = httpx.Client(**http_options(self.server, self.timeout_s))
        try:
            response = self._http.request(
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

    def _drive(self, sequence: Steps[T]) -> T:
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
                    answered = self.send(step)
                except ProblemError as error:
                    failed = error
            else:
                time.sleep(step)

    def _iterate(self, pages: Pages[T]) -> Iterator[T]:
        call = next(pages, None)
        while call is not None:
            page = self.send(call)
            yield page
            try:
                call = pages.send(page)
            except StopIteration:
                return


class Stream(Reader):
    """Iterate over it; `close` may be called from another thread and ends the iteration."""

    _socket: ClientConnection | None = None
    _exits: ExitStack | None = None  # of the socket, which must be used as a context manager

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> wire.StreamMessage:
        while not self._closed.is_set():
            try:
                return self._take(self._receive())
            except ProblemError as error:
                self._disconnect()
                if self._closed.is_set():
                    break
                self._closed.wait(self._wait_s(error))
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream; the iteration ends."""
        self._closed.set()
        self._disconnect()

    def _disconnect(self) -> None:
        exits, self._exits, self._socket = self._exits, None, None
        if exits is not None:
            exits.close()

    def _receive(self) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            self._socket = self._connect()
            self._opened()
        try:
            data: str | bytes = self._socket.recv()
        except ConnectionClosed as closed:
            raise broken(self.server, closed) from closed
        return data

    def _connect(self) -> ClientConnection:
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        self._exits = ExitStack()
        try:
            socket: ClientConnection = self._exits.enter_context(
                connect(self._address(), **stream_options(self.server))
            )
        except InvalidStatus as invalid:
            raise refused(self.server, invalid.response) from invalid
        except (OSError, WebSocketException) as error:
            raise unreachable(self.server, error) from error
        self.token_ignored = socket.response is not None and token_ignored(socket.response.headers)
        return socket
