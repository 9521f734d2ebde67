"""A live server as a source: one engine, with everything that the dashboard shows of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from vtoken import wire
from vtoken.client import AsyncClient, OutcomeUnknown, ProblemError, Server
from vtoken_console.feed.data import FeedData
from vtoken_console.feed.feed import Feed
from vtoken_console.feed.link import Link

HISTORY_EVENTS = 300


class LiveSource:
    """Reads one engine of a server: `server.engine`, on which changes are then made alone; else
    `server.shown` or the first, and changes are made on all engines of the server.

    `on_lookup` is called when the outcome of a change is unknown and is looked up.
    """

    replay = None  # the state of a replay: it is not a recording

    def __init__(
        self,
        server: Server,
        fps: float,
        *,
        on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None,
    ) -> None:
        self.name = server.url
        self.feed = Feed(FeedData())
        self.rest = AsyncClient(server, lookup_s=math.inf, on_lookup=on_lookup)
        self.link = Link(
            self.rest, self.feed, fps, on_hello=self._note_engine, complete=self._load_history
        )

    @property
    def ready(self) -> bool:
        """Whether the requested data can be shown."""
        return self.feed.ready

    def retry_now(self) -> None:
        self.link.retry_now()

    async def run(self) -> None:
        await self.link.run()

    def _note_engine(self, hello: wire.Hello) -> None:
        """Calls that read are about the engine of the stream."""
        if len(hello.engines) > 1:
            self.rest.server = replace(self.rest.server, shown=hello.engine)

    async def _load_history(self) -> None:
        """Loads the newest events from before this connection, and of each rare kind, since moves
        and evictions displace those. If the server refuses, the log is shorter.
        """
        rare = sorted({*get_args(wire.EventKind)} - wire.FREQUENT_KINDS)
        with contextlib.suppress(ProblemError):
            for kind in (None, *rare):
                page = await self.rest.events(limit=HISTORY_EVENTS, kind=kind)
                self.feed.data.add_past_events(page.events)
