"""What one stream has brought: the state of its connection, how much came, and the newest data.

The screen reads a feed whenever it draws, so the newest state wins and a burst of messages costs
only its decoding.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from vtoken import wire
from vtoken.wire.reducer import StreamState
from vtoken_console.feed.connection import Connection, State

if TYPE_CHECKING:
    from vtoken_console.feed.data import FeedData
    from vtoken_console.feed.engine_data import EngineData

# What messages make: everything of the dashboard's engine, or a row of the fleet page.
D = TypeVar("D", bound="FeedData | EngineData")


class Feed(Generic[D]):
    def __init__(self, data: D) -> None:
        self.data = data
        self.connection = Connection()
        self.received = 0.0  # monotonic time of the newest message [s]
        self.received_bytes = 0  # from the stream, since the start

    @property
    def model(self) -> StreamState:
        """The newest state."""
        return self.data.model

    @property
    def ready(self) -> bool:
        """Whether there is a status to show."""
        return self.connection.is_live and self.model.status is not None

    def apply(self, message: wire.StreamMessage) -> None:
        """Applies a message to the data; raises ResyncNeeded."""
        self.data.apply(message)
        self._mark_received()

    def replace(self, data: D) -> None:
        """Replaces all data, after a seek."""
        self.data = data
        self._mark_received()

    def set_connection(self, state: State, error: str = "", next_try: float | None = None) -> None:
        """Changes the connection's state; a closed connection stays closed."""
        if self.connection.state is not State.CLOSED:
            self.connection = self.connection.to(state, time.time(), error=error, next_try=next_try)

    def _mark_received(self) -> None:
        """Notes that data came; with the first complete state, the connection is live."""
        self.received = time.monotonic()
        if self.model.synced and self.connection.state is State.SYNCING:
            self.set_connection(State.LIVE)
