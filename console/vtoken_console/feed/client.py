"""Keeps one stream open, applies its messages to the model, and comes back after every loss.

Knows no widget: the screen reads `model`, `connection` and `series` whenever it draws, so the
newest state wins and a burst of messages costs no more than its decoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from http import HTTPStatus

from vtoken import wire
from vtoken.client import AsyncClient, NotVToken, ProblemError, Server, StreamGap
from vtoken.client.reader import backoff_s
from vtoken.stream.reducer import ResyncNeeded, StreamState
from vtoken_console.feed.connection import Connection, State
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.playhead import Bar
from vtoken_console.feed.series import Series

YIELD_EVERY = 64  # messages between two turns of the event loop
HISTORY_EVENTS = 300
STEADY_S = 2.0  # live for so long, a gap is answered by connecting at once


class Client:
    """One server. `run` never returns by itself; cancel it to stop."""

    def __init__(
        self,
        url: str,
        token: str | None,
        fps: float,
        *,
        clock: Callable[[], float] = time.time,
        rest: AsyncClient | None = None,
    ) -> None:
        self.url = url
        self.connection = Connection()
        self.rest = rest or AsyncClient(Server(url, token))
        self.received = 0.0  # monotonic time of the newest message [s]
        self.received_bytes = 0  # of the stream, since the start
        self._fps = fps
        self._clock = clock
        self._retry = asyncio.Event()
        self._feed = Feed()

    @property
    def model(self) -> StreamState:
        return self._feed.model

    @property
    def series(self) -> Series:
        return self._feed.series

    @property
    def audit(self) -> tuple[wire.AuditEntry, ...]:
        return self._feed.audit

    @property
    def ready(self) -> bool:
        """Whether what was asked for is there to be shown."""
        return self.connection.is_live and self.model.status is not None

    @property
    def replay(self) -> Bar | None:
        """Where a recording stands; None on a live server."""
        return None

    def retry_now(self) -> None:
        """Ends the wait for the next try."""
        self._retry.set()

    async def run(self) -> None:
        """Connects, reads, and after any loss waits and connects again."""
        try:
            while True:
                self._move(State.CONNECTING)
                state, at_once = State.LOST, False
                try:
                    await self._read_stream()
                    error = "the server closed the stream"
                except (ResyncNeeded, StreamGap) as reason:
                    error, at_once = f"resynchronising: {reason}", True
                except ProblemError as fault:
                    error = _words((await self._explained(fault)).problem)
                    if fault.problem.status and self.connection.state is State.CONNECTING:
                        state = State.REFUSED
                await self._wait(state, error, at_once=at_once)
        finally:
            self._move(State.CLOSED)
            await self.rest.aclose()

    def _move(self, state: State, error: str = "", next_try: float | None = None) -> None:
        if self.connection.state is not State.CLOSED:
            now = self._clock()
            self.connection = self.connection.to(state, now, error=error, next_try=next_try)

    async def _wait(self, state: State, error: str, *, at_once: bool) -> None:
        failures = self.connection.failures + 1
        # A gap soon after a fresh snapshot is a fault of the server: back off like for any other.
        steady = self.connection.is_live and self._clock() - self.connection.since > STEADY_S
        pause = 0.0 if at_once and steady else backoff_s(failures) * random.uniform(0.9, 1.1)
        self._retry.clear()
        self._move(state, error, self._clock() + pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._retry.wait(), pause)

    async def _explained(self, fault: ProblemError) -> ProblemError:
        """`fault`, or, where a server without vToken has refused its stream, that it is one."""
        if fault.problem.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            try:
                await self.rest.status()
            except NotVToken as better:
                return better
            except ProblemError:
                pass
        return fault

    async def _read_stream(self) -> None:
        history: asyncio.Task[None] | None = None
        async with self.rest.stream(fps=self._fps) as stream:
            try:
                count = 0
                async for message in stream:
                    if self.connection.state is State.CONNECTING:
                        self._move(State.SYNCING)
                    self.received_bytes += len(stream.raw)
                    self._take(message)
                    if isinstance(message, wire.Dropped):
                        history = None
                    if history is None and self.model.synced:
                        history = asyncio.create_task(self._load_history())
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
            finally:
                if history is not None:
                    history.cancel()

    def _take(self, message: wire.StreamMessage) -> None:
        self._feed.take(message)
        self.received = time.monotonic()
        if self.model.synced and self.connection.state is State.SYNCING:
            self._move(State.LIVE)

    async def _load_history(self) -> None:
        """Events from before this connection; the log is simply shorter when they are refused."""
        with contextlib.suppress(ProblemError):
            last_seq = (await self.rest.events(0, 1)).last_seq
            page = await self.rest.events(max(0, last_seq - HISTORY_EVENTS), HISTORY_EVENTS)
            self._feed.remember(page.events)


def _words(problem: wire.Problem) -> str:
    """What went wrong, and what to do where that is known."""
    if problem.status == HTTPStatus.UNAUTHORIZED:
        return f"{problem.status}: {problem.detail}; set VTOKEN_TOKEN"
    return f"{problem.status}: {problem.detail}" if problem.status else problem.detail
