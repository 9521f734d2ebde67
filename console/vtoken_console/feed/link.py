"""Keeps one stream of a server open, fills a feed from it, and reconnects after every loss."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Generic

from vtoken import wire
from vtoken.client import AsyncClient, NotVToken, ProblemError, StreamGap, TLSFailed
from vtoken.client.stream import ALL_TOPICS, Topic, backoff_s
from vtoken.wire.reducer import ResyncNeeded
from vtoken_console.feed.connection import State
from vtoken_console.feed.feed import D, Feed

YIELD_EVERY = 64  # messages between two yields to the event loop
EXPLAIN_S = 2.0  # for the answer that tells why there is no stream
STEADY_S = 2.0  # after a gap, reconnect at once if the connection was live for longer than this


class Link(Generic[D]):
    """Errors are recorded in `feed.connection`, not raised.

    `on_hello` is called with the first message of a connection. `complete` runs in the background
    once the feed has its first state, and again after events were dropped; the end of the
    connection cancels it. `settled` is set with the first state, or the first failure.
    """

    def __init__(
        self,
        rest: AsyncClient,
        feed: Feed[D],
        fps: float,
        *,
        topics: Iterable[Topic] = ALL_TOPICS,
        on_hello: Callable[[wire.Hello], None] = lambda _: None,
        complete: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.settled = asyncio.Event()
        self._rest = rest
        self.feed = feed
        self._fps = fps
        self._topics = tuple(topics)
        self._on_hello = on_hello
        self._complete = complete
        self._retry = asyncio.Event()

    def retry_now(self) -> None:
        """Ends the wait for the next attempt."""
        self._retry.set()

    async def run(self) -> None:
        """Connects and reads; after any loss, waits and reconnects."""
        try:
            while True:
                self.feed.set_connection(State.CONNECTING)
                state, at_once = State.LOST, False
                try:
                    await self._read_stream()
                    error = "the server closed the stream"
                except (ResyncNeeded, StreamGap) as reason:
                    error, at_once = f"resynchronising: {reason}", True
                except ProblemError as reason:
                    found = await self._explain(reason)
                    error = _error_text(found.problem)
                    answered = found.problem.status or isinstance(found, TLSFailed)
                    if answered and self.feed.connection.state is State.CONNECTING:
                        state = State.REFUSED
                await self._wait(state, error, at_once=at_once)
        finally:
            self.feed.set_connection(State.CLOSED)
            await self._rest.aclose()

    async def _wait(self, state: State, error: str, *, at_once: bool) -> None:
        connection = self.feed.connection
        # A gap soon after a snapshot is a server fault: back off as after any other failure.
        steady = connection.is_live and time.time() - connection.since > STEADY_S
        pause = backoff_s(connection.failures + 1) * random.uniform(0.9, 1.1)
        pause = 0.0 if at_once and steady else pause
        self._retry.clear()
        self.feed.set_connection(state, error, time.time() + pause)
        self.settled.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._retry.wait(), pause)

    async def _explain(self, error: ProblemError) -> ProblemError:
        """Returns NotVToken if a server without vToken gave no stream, else `error`.

        Some of those refuse it, and others do not answer it as HTTP.
        """
        if error.problem.status in (0, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            try:
                await asyncio.wait_for(self._rest.status(), EXPLAIN_S)
            except NotVToken as not_vtoken:
                return not_vtoken
            except (ProblemError, TimeoutError):
                pass
        return error

    async def _read_stream(self) -> None:
        completing: asyncio.Future[None] | None = None
        feed = self.feed
        async with self._rest.stream(self._topics, fps=self._fps) as stream:
            try:
                count = 0
                async for message in stream:
                    if isinstance(message, wire.Hello):
                        self._on_hello(message)
                    if feed.connection.state is State.CONNECTING:
                        feed.set_connection(State.SYNCING)
                    feed.received_bytes += len(stream.raw)
                    feed.apply(message)
                    if isinstance(message, wire.Dropped):
                        completing = None
                    if completing is None and feed.model.synced:
                        self.settled.set()
                        if self._complete is not None:
                            completing = asyncio.ensure_future(self._complete())
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
            finally:
                if completing is not None:
                    completing.cancel()


def _error_text(problem: wire.Problem) -> str:
    return f"{problem.status}: {problem.detail}" if problem.status else problem.detail
