"""All engines of one server: the first one's stream tells which others there are."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from vtoken import wire
from vtoken.client import Server
from vtoken_console.feed.engine_watch import EngineWatch

BEGIN_S = 1.0  # how long the next streams wait for one that begins


class ServerWatch:
    """`watches`: rank -> the watch of that engine, ascending; {None: …} until the ranks are known.

    `server.engine`: only this one is watched. `gate`: how many streams begin at once; the first
    message of each is large.
    """

    def __init__(self, server: Server, gate: asyncio.Semaphore) -> None:
        self.server = server
        self._gate = gate
        self._first = EngineWatch(server, self._take_ranks)
        self.watches: dict[int | None, EngineWatch] = {None: self._first}
        self._tasks: dict[int | None, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Watches the engines until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._begin(None, self._first))

    async def _begin(self, rank: int | None, watch: EngineWatch) -> None:
        assert self._group is not None
        async with self._gate:
            self._tasks[rank] = self._group.create_task(watch.run())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watch.link.settled.wait(), BEGIN_S)

    def retry_now(self) -> None:
        for watch in self.watches.values():
            watch.link.retry_now()

    def _take_ranks(self, hello: wire.Hello) -> None:
        """Watches exactly the engines that the server has."""
        own = hello.engine or 0
        ranks = sorted({own, *hello.engines}) if self.server.engine is None else [own]
        if [*self.watches] == ranks:
            return
        assert self._group is not None
        known, self.watches = self.watches, {}
        for rank in ranks:
            watch = self._first if rank == own else known.get(rank)
            if watch is None:
                watch = EngineWatch(replace(self.server, shown=rank))
                self._tasks[rank] = self._group.create_task(self._begin(rank, watch))
            self.watches[rank] = watch
        kept = {None} | {rank for rank, watch in self.watches.items() if watch is not self._first}
        for gone in self._tasks.keys() - kept:
            self._tasks.pop(gone).cancel()
