"""Forwards keys one at a time, so that text typed after a key that opens a page reaches that page.

Textual sends a key to the widget that has the focus when the key arrives, and handles it later. In
a burst (fast typing, an unbracketed paste, a slow machine) the following keys would reach the page
below, as commands or not at all. Invariants:

1. a key or paste is forwarded once the previous one is handled and the top page is mounted
2. keys keep their order, and none is dropped
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from textual import events
from textual.app import App
from textual.message import Message
from textual.message_pump import MessagePump

RETRY_S = 0.02  # between checks while keys wait for a page to open or a widget to close


class KeyQueue:
    """`forward` passes an event to Textual; the application calls `handled` for each `Handled`."""

    class Handled(Message):
        """Posted behind a key in the same message queues, so it arrives after the key."""

    def __init__(self, app: App[int], forward: Callable[[events.Event], Awaitable[None]]) -> None:
        self._app = app
        self._forward_event = forward
        self._waiting: deque[events.Key | events.Paste] = deque()
        self._handler: MessagePump | None = None  # that handles the newest key
        self._retry_scheduled = False

    async def put(self, event: events.Key | events.Paste) -> None:
        """Queues an event that has not been forwarded before."""
        self._waiting.append(event)
        await self._forward()

    async def handled(self) -> None:
        """Called when the newest key has been handled."""
        self._handler = None
        await self._forward()

    async def _forward(self) -> None:
        while self._waiting and self._is_ready:
            event = self._waiting.popleft()
            target = self._app.focused or self._app.screen
            self._handler = self._app  # also while a binding of the application runs
            await self._forward_event(event)
            posted = event.is_forwarded and target.post_message(self.Handled())
            self._handler = target if posted else None
        if self._waiting and not self._retry_scheduled:
            self._retry_scheduled = True
            self._app.set_timer(RETRY_S, self._retry)

    async def _retry(self) -> None:
        self._retry_scheduled = False
        await self._forward()

    @property
    def _is_ready(self) -> bool:
        handler = self._handler
        in_progress = handler is self._app or (
            handler is not None and handler.is_running and handler.is_attached
        )
        return not in_progress and self._app.screen.is_mounted
