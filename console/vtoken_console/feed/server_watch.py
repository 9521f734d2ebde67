"""All engines of one server: the first one's stream tells which others there are."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from vtoken import wire
from vtoken.client import AsyncClient, Server
from vtoken_console.feed.engine_data import EngineData
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.link import Link

FLEET_FPS = 1.0  # states a second of each engine
BEGIN_S = 1.0  # how long the next streams wait for one that begins


class ServerWatch:
    """`links`: rank -> the stream of that engine, ascending; {None: …} until the ranks are known.

    Each is light, with figures and blocks. `server.engine`: only this one is watched. `gate`: how
    many streams begin at once; the first message of each is large.
    """

    def __init__(self, server: Server, gate: asyncio.Semaphore) -> None:
        self.server = server
        self._gate = gate
        self._first = self._link(server)
        self.links: dict[int | None, Link[EngineData]] = {None: self._first}
        self._tasks: dict[int | None, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    def _link(self, server: Server) -> Link[EngineData]:
        """A stream of `server.engine`, else of `server.shown`, else of the first engine."""
        on_hello = self._take_ranks if server is self.server else lambda _: None
        return Link(
            AsyncClient(server),
            Feed(EngineData()),
            FLEET_FPS,
            topics=("metrics", "blocks"),
            on_hello=on_hello,
        )

    async def run(self) -> None:
        """Watches the engines until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._begin(None, self._first))

    async def _begin(self, rank: int | None, link: Link[EngineData]) -> None:
        assert self._group is not None
        async with self._gate:
            self._tasks[rank] = self._group.create_task(link.run())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.settled.wait(), BEGIN_S)

    def retry_now(self) -> None:
        for link in self.links.values():
            link.retry_now()

    def _take_ranks(self, hello: wire.Hello) -> None:
        """Watches exactly the engines that the server has."""
        own = hello.engine or 0
        ranks = sorted({own, *hello.engines}) if self.server.engine is None else [own]
        if [*self.links] == ranks:
            return
        assert self._group is not None
        known, self.links = self.links, {}
        for rank in ranks:
            link = self._first if rank == own else known.get(rank)
            if link is None:
                link = self._link(replace(self.server, shown=rank))
                self._tasks[rank] = self._group.create_task(self._begin(rank, link))
            self.links[rank] = link
        kept = {None} | {rank for rank, link in self.links.items() if link is not self._first}
        for gone in self._tasks.keys() - kept:
            self._tasks.pop(gone).cancel()
