"""What every receiver of a stream has: the state of its connection, and how much has come.

The screen reads a channel whenever it draws, so the newest state wins and a burst of messages costs
only its decoding.
"""

from __future__ import annotations

import time

from vtoken import wire
from vtoken.wire.reducer import StreamState
from vtoken_console.feed.connection import Connection, State


class Channel:
    """A subclass applies messages and holds the `model` that they make."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.received = 0.0  # monotonic time of the newest message [s]
        self.received_bytes = 0  # from the stream, since the start

    @property
    def model(self) -> StreamState:
        """The newest state."""
        raise NotImplementedError

    def take(self, message: wire.StreamMessage) -> None:
        """Applies a message to the model; raises ResyncNeeded without applying a part of it."""
        raise NotImplementedError

    def apply(self, message: wire.StreamMessage) -> None:
        """Takes a message, and notes when; raises ResyncNeeded."""
        self.take(message)
        self.mark_received()

    def set_connection(self, state: State, error: str = "", next_try: float | None = None) -> None:
        """Changes the connection's state; a closed connection stays closed."""
        if self.connection.state is not State.CLOSED:
            self.connection = self.connection.to(state, time.time(), error=error, next_try=next_try)

    def mark_received(self) -> None:
        """Notes that data came; with the first complete state, the connection is live."""
        self.received = time.monotonic()
        if self.model.synced and self.connection.state is State.SYNCING:
            self.set_connection(State.LIVE)
