"""The source of the dashboard: one engine of a server, which can be replaced, or a recording.

Imports modules that need numpy or a network library here, after the first frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vtoken.client import OutcomeUnknown, Server
    from vtoken.wire.reducer import StreamState
    from vtoken_console.feed.live import LiveSource
    from vtoken_console.feed.replay import Replay

    Source: TypeAlias = LiveSource | Replay  # fills a feed until it is cancelled

HEAVY = ("httpx", "websockets.asyncio.client", "vtoken_console.feed.live")
OPEN_S = 2.0  # how long the engine before stays on the screen while another one is read


class Session:
    """`source` is None until its libraries are imported; `server` until one is opened.

    `first`: the server to begin with, or its URL; empty: none, until `open`. `engine`: the one that
    it names. `read_only`: requested by the viewer. `recording`: a file to play from `moment` on.
    `on_lookup`: called when the outcome of a change is unknown and is looked up.
    """

    def __init__(
        self,
        first: Server | str,
        *,
        fps: float,
        read_only: bool,
        recording: Path | None,
        moment: str | None,
    ) -> None:
        self.url = first if isinstance(first, str) else first.url
        self.engine = None if isinstance(first, str) else first.engine
        self.read_only = read_only
        self.source: Source | None = None
        self.replay: Replay | None = None  # the source, if it is a recording
        self.server: Server | None = None  # of the source
        self.on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None
        self._first = first
        self._fps = fps
        self._recording = recording
        self._moment = moment
        self._group: asyncio.TaskGroup | None = None
        self._began = asyncio.Event()  # `_group` is entered
        self._running: asyncio.Task[None] | None = None

    @property
    def model(self) -> StreamState | None:
        """The newest state; None while there is no source."""
        return self.source.feed.model if self.source is not None else None

    async def run(self) -> None:
        """Fills the source's feed until cancelled."""
        for name in HEAVY:
            await asyncio.to_thread(importlib.import_module, name)
        if self._recording is not None:
            from vtoken_console.feed.replay import Replay

            self.source = self.replay = Replay(self._recording, moment=self._moment)
            await self.source.run()
            return
        from vtoken.client import Server

        async with asyncio.TaskGroup() as self._group:
            self._began.set()
            first = self._first
            if first:
                await self.open(Server(first) if isinstance(first, str) else first)
            await asyncio.Event().wait()

    async def open(self, server: Server) -> None:
        """Reads this server's engine from now on.

        The source is replaced once the new one has data or has failed, after OPEN_S at the latest.
        """
        from vtoken_console.feed.live import LiveSource

        await self._began.wait()
        assert self._group is not None
        source = LiveSource(server, self._fps, on_lookup=self.on_lookup)
        running = self._group.create_task(source.run())
        if self.source is None:
            self._show(source, server, running)
            return
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(source.link.settled.wait(), OPEN_S)
        except asyncio.CancelledError:
            running.cancel()
            raise
        await self.pause()
        self._show(source, server, running)

    async def pause(self) -> None:
        """Ends the stream; the newest state stays."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])

    def _show(self, source: Source, server: Server, running: asyncio.Task[None]) -> None:
        self.source, self.server, self._running = source, server, running
        self.url = server.url
