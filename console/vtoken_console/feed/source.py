"""The interface of the console's data sources: a live server or a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vtoken.client import AsyncClient
    from vtoken_console.feed.data import FeedData
    from vtoken_console.feed.feed import Feed
    from vtoken_console.feed.playhead import ReplayStatus


class Source(Protocol):
    """Fills `feed`."""

    name: str  # URL of a server, name of a file
    feed: Feed[FeedData]

    @property
    def rest(self) -> AsyncClient:
        """The REST client; in a replay it refuses every call."""

    @property
    def ready(self) -> bool:
        """Whether the requested data can be shown."""

    @property
    def replay(self) -> ReplayStatus | None:
        """The state of a replay; None on a live server."""

    def retry_now(self) -> None:
        """Ends the wait for the next attempt."""

    async def run(self) -> None:
        """Fills the feed until cancelled."""
