"""The data of a source: the state of its connection and the newest stream data.

The screen reads the feed whenever it draws, so the newest state wins and a burst of messages costs
only its decoding.
"""

from __future__ import annotations

import time

from vtoken import wire
from vtoken.wire.reducer import StreamState
from vtoken_console.feed.connection import Connection, State
from vtoken_console.feed.data import FeedData
from vtoken_console.feed.series import Series


class Feed:
    """Each source owns and fills one feed."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.data = FeedData()
        self.received = 0.0  # monotonic time of the newest message [s]
        self.received_bytes = 0  # from the stream, since the start

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

    def set_connection(self, state: State, error: str = "", next_try: float | None = None) -> None:
        """Changes the connection's state; a closed connection stays closed."""
        if self.connection.state is not State.CLOSED:
            self.connection = self.connection.to(state, time.time(), error=error, next_try=next_try)

    def apply(self, message: wire.StreamMessage) -> None:
        """Applies a message; raises ResyncNeeded without applying a part of it."""
        self.data.apply(message)
        self._mark_received()

    def replace(self, data: FeedData) -> None:
        """Replaces all data, after a seek."""
        self.data = data
        self._mark_received()

    def _mark_received(self) -> None:
        self.received = time.monotonic()
        if self.model.synced and self.connection.state is State.SYNCING:
            self.set_connection(State.LIVE)
