"""All engines of all servers that the console watches, each with a stream of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtoken.client import Server
from vtoken_console.feed.engine_data import EngineData
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.server_watch import ServerWatch

NUM_BEGINNING = 8  # streams that begin at once
TRIM_S = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of `server`, which has `num_engines`; `rank` is None until the server answers."""

    server: Server
    rank: int | None
    num_engines: int
    feed: Feed[EngineData]


class Fleet:
    """At least one server. A server that does not answer is one member."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)
        gate = asyncio.Semaphore(NUM_BEGINNING)
        self._watches = [ServerWatch(server, gate) for server in servers]

    async def run(self) -> None:
        """Watches every engine until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self._watches:
                group.create_task(watch.run())
            while not self.settled:
                await asyncio.sleep(TRIM_S)
            await asyncio.sleep(TRIM_S)  # the last snapshots are still being taken
            _trim_heap()

    @property
    def members(self) -> Iterator[Member]:
        """Every engine, in the order of the servers and of their ranks."""
        for watch in self._watches:
            for rank, link in watch.links.items():
                yield Member(watch.server, rank, len(watch.links), link.feed)

    @property
    def settled(self) -> bool:
        """Whether every engine has been read or has failed once."""
        return all(
            link.settled.is_set() for watch in self._watches for link in watch.links.values()
        )

    @property
    def received_bytes(self) -> int:
        """From all streams, since the start."""
        return sum(member.feed.received_bytes for member in self.members)

    def retry_now(self) -> None:
        """Ends every wait for the next attempt."""
        for watch in self._watches:
            watch.retry_now()


def _trim_heap() -> None:
    """Gives freed memory back to the system, where the C library is glibc.

    Snapshots of large pools come and go while many streams begin: of 64 engines with 70,000 blocks
    glibc keeps some 45 MB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
