"""The synchronous client: every call as a method that returns the wire document.

httpx is imported on first use. `calls` defines the calls, `answers` decodes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from vtoken import wire
from vtoken.client import calls, request_text, sequences
from vtoken.client.answers import answer, http_options, no_answer, token_ignored
from vtoken.client.asynchronous import AsyncStream
from vtoken.client.calls import Call
from vtoken.client.errors import OutcomeUnknown, ProblemError
from vtoken.client.methods import as_method
from vtoken.client.outcome import looked_up
from vtoken.client.reader import ALL_TOPICS, Format, Topic
from vtoken.client.sequences import Pages, Steps
from vtoken.client.server import TIMEOUT_S, Server

if TYPE_CHECKING:
    import httpx

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
        return Stream(AsyncStream(self.server, topics, fps, format, resume, reconnect))

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
    def received_bytes(self) -> int:
        """Of all messages."""
        return self._stream.received_bytes

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
