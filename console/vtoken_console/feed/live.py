"""A live server as a source: keeps one stream open and reconnects after every loss."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

from vtoken import wire
from vtoken.client import (
    AsyncClient,
    NotVToken,
    OutcomeUnknown,
    ProblemError,
    Server,
    StreamGap,
)
from vtoken.client.reader import backoff_s
from vtoken.wire.reducer import ResyncNeeded
from vtoken_console.feed.connection import State
from vtoken_console.feed.data import FeedData
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.playhead import ReplayStatus

YIELD_EVERY = 64  # messages between two yields to the event loop
HISTORY_EVENTS = 300
STEADY_S = 2.0  # after a gap, reconnect at once if the connection was live for longer than this


class LiveSource:
    """Reads one engine of a server. Errors are recorded in `feed.connection`, not raised.

    `engine`: its rank, and changes are made on it alone; None: the first, and changes are made on
    all. `show` changes which one is read.
    `on_lookup` is called when the outcome of a change is unknown and is looked up.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        fps: float,
        engine: int | None = None,
        on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None,
    ) -> None:
        self.name = url
        self.feed = Feed()
        server = Server(url, token, engine=engine)
        self.rest = AsyncClient(server, lookup_s=math.inf, on_lookup=on_lookup)
        self._fps = fps
        self._turned = False  # another engine is to be read
        self._retry = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.feed.ready

    @property
    def replay(self) -> ReplayStatus | None:
        return None

    def retry_now(self) -> None:
        self._retry.set()

    def turn(self, by: int) -> int | None:
        """Reads the engine `by` ranks further on; its rank, None if the server has one engine."""
        hello, server = self.feed.model.hello, self.rest.server
        if hello is None or hello.engine is None or len(hello.engines) < 2:
            return None
        at = hello.engines.index(hello.engine)
        rank = hello.engines[(at + by) % len(hello.engines)]
        if server.engine is None:
            self.rest.server = replace(server, shown=rank)
        else:
            self.rest.server = replace(server, engine=rank)
        self._turned = True
        self.retry_now()
        return rank

    async def run(self) -> None:
        """Connects and reads; after any loss, waits and reconnects."""
        try:
            while True:
                self.feed.set_connection(State.CONNECTING)
                state, at_once = State.LOST, False
                try:
                    await self._read_stream()
                    if self._turned:
                        self._turned = False
                        self.feed.replace(FeedData())
                        continue
                    error = "the server closed the stream"
                except (ResyncNeeded, StreamGap) as reason:
                    error, at_once = f"resynchronising: {reason}", True
                except ProblemError as reason:
                    error = _error_text((await self._explain(reason)).problem)
                    if reason.problem.status and self.feed.connection.state is State.CONNECTING:
                        state = State.REFUSED
                await self._wait(state, error, at_once=at_once)
        finally:
            self.feed.set_connection(State.CLOSED)
            await self.rest.aclose()

    async def _wait(self, state: State, error: str, *, at_once: bool) -> None:
        connection = self.feed.connection
        # A gap soon after a snapshot is a server fault: back off as after any other failure.
        steady = connection.is_live and time.time() - connection.since > STEADY_S
        pause = backoff_s(connection.failures + 1) * random.uniform(0.9, 1.1)
        pause = 0.0 if at_once and steady else pause
        self._retry.clear()
        self.feed.set_connection(state, error, time.time() + pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._retry.wait(), pause)

    async def _explain(self, error: ProblemError) -> ProblemError:
        """Returns NotVToken if a server without vToken refused the stream, else `error`."""
        if error.problem.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            try:
                await self.rest.status()
            except NotVToken as not_vtoken:
                return not_vtoken
            except ProblemError:
                pass
        return error

    async def _read_stream(self) -> None:
        history: asyncio.Task[None] | None = None
        async with self.rest.stream(fps=self._fps) as stream:
            try:
                count = 0
                async for message in stream:
                    if self._turned:
                        return
                    if isinstance(message, wire.Hello) and len(message.engines) > 1:
                        self.rest.server = replace(self.rest.server, shown=message.engine)
                    if self.feed.connection.state is State.CONNECTING:
                        self.feed.set_connection(State.SYNCING)
                    self.feed.received_bytes += len(stream.raw)
                    self.feed.apply(message)
                    if isinstance(message, wire.Dropped):
                        history = None
                    if history is None and self.feed.model.synced:
                        history = asyncio.create_task(self._load_history())
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
            finally:
                if history is not None:
                    history.cancel()

    async def _load_history(self) -> None:
        """Loads events from before this connection. If the server refuses, the log is shorter."""
        with contextlib.suppress(ProblemError):
            last_seq = (await self.rest.events(0, 1)).last_seq
            page = await self.rest.events(max(0, last_seq - HISTORY_EVENTS), HISTORY_EVENTS)
            self.feed.data.add_past_events(page.events)


def _error_text(problem: wire.Problem) -> str:
    """The error and, if known, its remedy."""
    if problem.status == HTTPStatus.UNAUTHORIZED:
        return f"{problem.status}: {problem.detail}; set VTOKEN_TOKEN"
    return f"{problem.status}: {problem.detail}" if problem.status else problem.detail
