"""The synchronous client: every call as a method that returns the wire document.

httpx is imported on first use.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Self, TypeVar

from vtoken import wire
from vtoken.client.answers import no_answer
from vtoken.client.asynchronous import AsyncStream
from vtoken.client.base import BaseClient
from vtoken.client.calls import Call
from vtoken.client.errors import OutcomeUnknown, ProblemError
from vtoken.client.reader import ALL_TOPICS, Format, Topic
from vtoken.client.sequences import Pages, Steps, looked_up

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Client(BaseClient):
    __doc__ = f"{BaseClient.__doc__}\n    A client is thread-safe.\n    "

    _http: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._http is not None:
            self._http.close()
            self._http = None

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
            return self._exchange(call)
        except OutcomeUnknown as lost:
            if not self.lookup_s:
                raise
            self.on_lookup(lost)
            found: T = self.run(looked_up(lost, self.lookup_s))
            return found

    def _exchange(self, call: Call[T]) -> T:
        import httpx

        if self._http is None:
            self._http = httpx.Client(**self._options())
        try:
            response = self._http.request(**self._request(call))
        except httpx.HTTPError as error:
            raise no_answer(self.server, call, error, self.timeout_s) from error
        return self._answer(call, response)

    def run(self, sequence: Steps[T]) -> T:
        """Make the calls of a sequence and return its result."""
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

    def pages(self, sequence: Pages[T]) -> Iterator[T]:
        """Yield the answers to the calls of a sequence."""
        call = next(sequence, None)
        while call is not None:
            page = self.send(call)
            yield page
            try:
                call = sequence.send(page)
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
