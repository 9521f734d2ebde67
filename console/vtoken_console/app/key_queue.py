"""One key at a time: what is typed behind a key that opens a page is typed into that page.

Textual hands a key to whatever has the focus when the key comes, and acts on it a moment later. In
a burst (fast typing, a paste that the terminal does not mark, a slow machine) the rest would reach
the page below, as commands or not at all. Knows no key and no page. Invariants:

1. a key or a paste is handed on once the one before it was handled and the page on top is mounted
2. they keep their order, and none is dropped
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from textual import events
from textual.app import App
from textual.message import Message
from textual.message_pump import MessagePump

LOOK_AGAIN_S = 0.02  # while keys wait for a page that opens, or for a widget that closes


class KeyQueue:
    """`hand_on` gives an event to Textual; the application calls `handled` for every `Handled`."""

    class Handled(Message):
        """Follows a key through the queues of the widget and its parents, and so comes after it."""

    def __init__(self, app: App[int], hand_on: Callable[[events.Event], Awaitable[None]]) -> None:
        self._app = app
        self._hand_on_event = hand_on
        self._typed: deque[events.Key | events.Paste] = deque()
        self._handler: MessagePump | None = None  # what the newest key was handed to
        self._looks_again = False

    async def put(self, event: events.Key | events.Paste) -> None:
        """An event that was not handed on before."""
        self._typed.append(event)
        await self._hand_on()

    async def handled(self) -> None:
        """The newest key was acted on."""
        self._handler = None
        await self._hand_on()

    async def _hand_on(self) -> None:
        while self._typed and self._is_ready:
            event = self._typed.popleft()
            target = self._app.focused or self._app.screen
            self._handler = self._app  # also while a binding of the application runs
            await self._hand_on_event(event)
            follows = event.is_forwarded and target.post_message(self.Handled())
            self._handler = target if follows else None
        if self._typed and not self._looks_again:
            self._looks_again = True
            self._app.set_timer(LOOK_AGAIN_S, self._look_again)

    async def _look_again(self) -> None:
        self._looks_again = False
        await self._hand_on()

    @property
    def _is_ready(self) -> bool:
        handler = self._handler
        under_way = handler is self._app or (
            handler is not None and handler.is_running and handler.is_attached
        )
        return not under_way and self._app.screen.is_mounted
