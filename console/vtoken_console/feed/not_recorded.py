"""In the place of a server's REST interface: says what a recording holds of what was asked.

Knows the calls of the client and the model, no file. Nothing is ever sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vtoken import wire
from vtoken.client import AsyncClient, ProblemError
from vtoken.client.calls import Call
from vtoken.stream.reducer import StreamState

T = TypeVar("T")


class NotRecorded(AsyncClient):
    """Refuses every call, with what the recording can say in its place."""

    def __init__(self, model: Callable[[], StreamState]) -> None:
        self._model = model

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def send(self, call: Call[T]) -> T:
        title, detail = "This is a recording", self._detail(call.path)
        raise ProblemError(wire.Problem(status=0, title=title, detail=detail))

    def _detail(self, path: str) -> str:
        what, _, name = path.strip("/").partition("/")
        if what == "requests":
            return "its text, tokens and blocks are not in it, only its row in the panel."
        if what == "blocks" and name.isdigit():
            return f"slots are not in it. {self._block(int(name))}"
        return "there is no server to ask; nothing was sent"

    def _block(self, block: int) -> str:
        model = self._model()
        if block >= model.num_blocks:
            return ""
        flags = int(model.flags[block])
        if not flags:
            return f"Block {block:,} is free."
        words = [
            word
            for bit, word in (
                (wire.FLAG_SHARED, "shared"),
                (wire.FLAG_HASHED, "cached"),
                (wire.FLAG_IN_FLIGHT, "being moved"),
                (wire.FLAG_TAIL, "appended to"),
            )
            if flags & bit
        ]
        live = f"Block {block:,}: {int(model.live[block])} of {model.block_size} live"
        return ", ".join([live, *words]) + "."
