"""What a source brings the screen: the state of its link, and the newest picture.

Knows the wire, no socket, no file and no widget. The screen reads it whenever it draws, so the
newest state wins and a burst of messages costs no more than its decoding.
"""

from __future__ import annotations

import time

from vtoken import wire
from vtoken.stream.reducer import StreamState
from vtoken_console.feed.connection import Connection, State
from vtoken_console.feed.picture import Picture
from vtoken_console.feed.series import Series


class Feed:
    """Filled by the one source that owns it."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.picture = Picture()
        self.received = 0.0  # monotonic time of the newest message [s]
        self.received_bytes = 0  # of a stream, since the start

    @property
    def model(self) -> StreamState:
        return self.picture.model

    @property
    def series(self) -> Series:
        return self.picture.series

    @property
    def ready(self) -> bool:
        """Whether there is something to be shown."""
        return self.connection.is_live and self.model.status is not None

    def move(self, state: State, error: str = "", next_try: float | None = None) -> None:
        """The link is in another state; one that is closed stays closed."""
        if self.connection.state is not State.CLOSED:
            self.connection = self.connection.to(state, time.time(), error=error, next_try=next_try)

    def take(self, message: wire.StreamMessage) -> None:
        """Applies a message as a whole, or raises ResyncNeeded."""
        self.picture.take(message)
        self._came()

    def show(self, picture: Picture) -> None:
        """Another picture in the place of this one."""
        self.picture = picture
        self._came()

    def _came(self) -> None:
        self.received = time.monotonic()
        if self.model.synced and self.connection.state is State.SYNCING:
            self.move(State.LIVE)
