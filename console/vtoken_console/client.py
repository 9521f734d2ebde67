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
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from vtoken import wire
from vtoken_console.connection import Connection, State, backoff_s
from vtoken_console.model import Model, ResyncNeeded, apply, with_events
from vtoken_console.rest import PREFIX, ProblemError, Rest, is_loopback
from vtoken_console.samples import NAMES, Sampler, marker_of
from vtoken_console.series import Series

YIELD_EVERY = 64  # messages between two turns of the event loop
HISTORY_EVENTS = 300
OPEN_TIMEOUT_S = 10.0
STEADY_S = 2.0  # live for so long, a gap is answered by connecting at once


def stream_url(url: str, fps: float) -> str:
    """The websocket address of the stream of the server at `url` (http, https, ws or wss)."""
    parts = urlsplit(url.rstrip("/"))
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    query = urlencode(
        {"topics": "blocks,requests,events,metrics", "fps": f"{fps:g}", "format": "msgpack"},
        safe=",",
    )
    return urlunsplit((scheme, parts.netloc, f"{parts.path}{PREFIX}/stream", query, ""))


class Client:
    """One server. `run` never returns by itself; cancel it to stop."""

    def __init__(
        self, url: str, token: str | None, fps: float, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.url = url
        self.model = Model()
        self.connection = Connection()
        self.series = Series(NAMES)
        self.rest = Rest(url, token)
        self.received = 0.0  # monotonic time of the newest message [s]
        self.received_bytes = 0  # of the stream, since the start
        self._stream_url = stream_url(url, fps)
        self._token = token
        self._clock = clock
        self._retry = asyncio.Event()
        self._sampler = Sampler()
        self._decoder = msgspec.msgpack.Decoder(wire.StreamMessage)

    def retry_now(self) -> None:
        """Ends the wait for the next try."""
        self._retry.set()

    async def run(self) -> None:
        """Connects, reads, and after any loss waits and connects again."""
        try:
            while True:
                self._move(State.CONNECTING)
                try:
                    await self._read_stream()
                    error, state, at_once = "the server closed the stream", State.LOST, False
                except ResyncNeeded as reason:
                    error, state, at_once = f"resynchronising: {reason}", State.LOST, True
                except InvalidStatus as refusal:
                    error, at_once = _refusal(refusal.response.status_code), False
                    state = State.REFUSED
                except ConnectionClosed as closed:
                    error, at_once, state = _closed(closed), False, State.LOST
                except (OSError, WebSocketException, TimeoutError) as fault:
                    error, state, at_once = _reason(fault), State.LOST, False
                except msgspec.MsgspecError as fault:
                    error, at_once = f"a message is not what the schema says: {fault}", False
                    state = State.LOST
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

    async def _read_stream(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        async with connect(
            self._stream_url,
            additional_headers=headers,
            compression=None,
            max_size=None,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=1,
            ping_interval=5,
            ping_timeout=10,
            proxy=None if is_loopback(self.url) else True,
        ) as socket:
            self._move(State.SYNCING)
            history: asyncio.Task[None] | None = None
            try:
                count = 0
                async for data in socket:
                    raw = data if isinstance(data, bytes) else data.encode()
                    self.received_bytes += len(raw)
                    message = self._decoder.decode(raw)
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
        old = self.model
        try:
            self.model = apply(old, message)
        except (ValueError, IndexError) as fault:  # arrays that do not fit each other
            raise ResyncNeeded(f"{type(message).__name__.lower()}: {fault}") from fault
        self.received = time.monotonic()
        if self.model.synced and self.connection.state is State.SYNCING:
            self._move(State.LIVE)
        if isinstance(message, wire.EventMessage):
            self._mark(message.event)
        status = self.model.status
        if status is not None and status is not old.status:
            self.series.add(status.ts, self._sampler.sample(status))

    def _mark(self, event: wire.Event) -> None:
        marker = marker_of(event)
        if marker is not None:
            self.series.mark(marker)

    async def _load_history(self) -> None:
        """Events from before this connection; the log is simply shorter when they are refused."""
        with contextlib.suppress(ProblemError):
            last_seq = (await self.rest.events(0, 1)).last_seq
            page = await self.rest.events(max(0, last_seq - HISTORY_EVENTS), HISTORY_EVENTS)
            self.model = with_events(self.model, page.events)
            for event in page.events:
                self._mark(event)


def _refusal(status: int) -> str:
    if status == 401:
        return "401: the server wants a token; set VTOKEN_TOKEN"
    if status == 403:
        return "403: the token or the origin is not allowed to read the stream"
    if status == 404:
        return "404: no vToken stream there; is it a server started with `vtoken serve`?"
    return f"the server answered {status}"


def _closed(closed: ConnectionClosed) -> str:
    if closed.rcvd is not None and closed.rcvd.reason:
        return f"the server closed the stream: {closed.rcvd.reason}"
    return "the connection broke"


def _reason(fault: BaseException) -> str:
    if isinstance(fault, ConnectionRefusedError) or "Connect call failed" in str(fault):
        return "nothing listens there (connection refused)"
    if isinstance(fault, TimeoutError):
        return "no answer in time"
    return str(fault) or type(fault).__name__
