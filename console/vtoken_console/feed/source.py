"""Where the console's data comes from: a live server, or a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vtoken.client import AsyncClient
    from vtoken_console.feed.feed import Feed
    from vtoken_console.feed.playhead import Bar


class Source(Protocol):
    """Fills `feed`."""

    name: str  # URL of a server, name of a file
    feed: Feed

    @property
    def rest(self) -> AsyncClient:
        """What answers, or refuses, calls beside the stream."""

    @property
    def ready(self) -> bool:
        """Whether what was asked for is there to be shown."""

    @property
    def replay(self) -> Bar | None:
        """Where a recording stands; None on a live server."""

    def retry_now(self) -> None:
        """Ends the wait for the next try."""

    async def run(self) -> None:
        """Fills the feed; never returns by itself, cancel it to stop."""
