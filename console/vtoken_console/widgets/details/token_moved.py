"""The message of the widgets that show tokens when their cursor moves."""

from __future__ import annotations

from textual.message import Message


class TokenMoved(Message):
    """The cursor moved to another token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token
