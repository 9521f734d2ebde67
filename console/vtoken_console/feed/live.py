"""A live server as a source: keeps one stream open, and comes back after every loss.

Knows no widget.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from http import HTTPStatus

from vtoken import wire
from vtoken.client import AsyncClient, NotVToken, ProblemError, Server, StreamGap
from vtoken.client.reader import backoff_s
from vtoken.stream.reducer import ResyncNeeded
from vtoken_console.feed.connection import State
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.playhead import Bar

YIELD_EVERY = 64  # messages between two turns of the event loop
HISTORY_EVENTS = 300
STEADY_S = 2.0  # live for so long, a gap is answered by connecting at once


class LiveSource:
    """One server. Raises nothing while it runs: what goes wrong stands in `feed.connection`."""

    def __init__(self, url: str, token: str | None, fps: float) -> None:
        self.name = url
        self.feed = Feed()
        self.rest = AsyncClient(Server(url, token))
        self._fps = fps
        self._retry = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.feed.ready

    @property
    def replay(self) -> Bar | None:
        return None

    def retry_now(self) -> None:
        self._retry.set()

    async def run(self) -> None:
        """Connects, reads, and after any loss waits and connects again."""
        try:
            while True:
                self.feed.move(State.CONNECTING)
                state, at_once = State.LOST, False
                try:
                    await self._read_stream()
                    error = "the server closed the stream"
                except (ResyncNeeded, StreamGap) as reason:
                    error, at_once = f"resynchronising: {reason}", True
                except ProblemError as fault:
                    error = _words((await self._explained(fault)).problem)
                    if fault.problem.status and self.feed.connection.state is State.CONNECTING:
                        state = State.REFUSED
                await self._wait(state, error, at_once=at_once)
        finally:
            self.feed.move(State.CLOSED)
            await self.rest.aclose()

    async def _wait(self, state: State, error: str, *, at_once: bool) -> None:
        link = self.feed.connection
        # A gap soon after a fresh snapshot is a fault of the server: back off like for any other.
        steady = link.is_live and time.time() - link.since > STEADY_S
        pause = backoff_s(link.failures + 1) * random.uniform(0.9, 1.1)
        pause = 0.0 if at_once and steady else pause
        self._retry.clear()
        self.feed.move(state, error, time.time() + pause)
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
                    if self.feed.connection.state is State.CONNECTING:
                        self.feed.move(State.SYNCING)
                    self.feed.received_bytes += len(stream.raw)
                    self.feed.take(message)
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
        """Events from before this connection; the log is simply shorter when they are refused."""
        with contextlib.suppress(ProblemError):
            last_seq = (await self.rest.events(0, 1)).last_seq
            page = await self.rest.events(max(0, last_seq - HISTORY_EVENTS), HISTORY_EVENTS)
            self.feed.picture.remember(page.events)


def _words(problem: wire.Problem) -> str:
    """What went wrong, and what to do where that is known."""
    if problem.status == HTTPStatus.UNAUTHORIZED:
        return f"{problem.status}: {problem.detail}; set VTOKEN_TOKEN"
    return f"{problem.status}: {problem.detail}" if problem.status else problem.detail
