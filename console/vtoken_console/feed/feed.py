"""The data of a source: the state of its connection and everything that the dashboard draws."""

from __future__ import annotations

from vtoken import wire
from vtoken.wire.reducer import StreamState
from vtoken_console.feed.channel import Channel
from vtoken_console.feed.data import FeedData
from vtoken_console.feed.series import Series


class Feed(Channel):
    """Each source owns and fills one feed."""

    def __init__(self) -> None:
        super().__init__()
        self.data = FeedData()

    @property
    def model(self) -> StreamState:
        return self.data.model

    @property
    def series(self) -> Series:
        return self.data.series

    @property
    def ready(self) -> bool:
        """Whether there is a status to show."""
        return self.connection.is_live and self.model.status is not None

    def take(self, message: wire.StreamMessage) -> None:
        self.data.apply(message)

    def replace(self, data: FeedData) -> None:
        """Replaces all data, after a seek."""
        self.data = data
        self.mark_received()
