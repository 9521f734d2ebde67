"""One engine of a fleet: a light stream, once a second, with figures and blocks."""

from __future__ import annotations

from collections.abc import Callable

from vtoken import wire
from vtoken.client import AsyncClient, Server
from vtoken_console.feed.engine_feed import EngineFeed
from vtoken_console.feed.link import Link

FLEET_FPS = 1.0  # states a second of each engine


class EngineWatch:
    """Fills `feed` from `server.engine`, else from `server.shown`, else from the first engine."""

    def __init__(
        self, server: Server, on_hello: Callable[[wire.Hello], None] = lambda _: None
    ) -> None:
        self.server = server
        self.feed = EngineFeed()
        self.link = Link(
            AsyncClient(server),
            self.feed,
            FLEET_FPS,
            topics=("metrics", "blocks"),
            on_hello=on_hello,
        )

    async def run(self) -> None:
        """Fills the feed until cancelled."""
        await self.link.run()
