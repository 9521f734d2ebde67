"""The REST client of a replay: refuses every call and reports what the recording holds instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vtoken import wire
from vtoken.client import AsyncClient, ProblemError
from vtoken.client.calls import Call
from vtoken.wire.reducer import StreamState
from vtoken_console.style.words import flag_words

T = TypeVar("T")


class OfflineClient(AsyncClient):
    """Raises ProblemError for every call; nothing is ever sent."""

    def __init__(self, model: Callable[[], StreamState]) -> None:
        self._model = model

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def send(self, call: Call[T]) -> T:
        title, detail = "This is a recording", self._detail(call.path)
        raise ProblemError(wire.Problem(status=0, title=title, detail=detail))

    def _detail(self, path: str) -> str:
        resource, _, name = path.strip("/").partition("/")
        if resource == "requests":
            return "it holds the request's table row, not its text, tokens and blocks."
        if resource == "blocks" and name.isdigit():
            return f"it holds no slots. {self._block(int(name))}"
        return "there is no server; nothing was sent"

    def _block(self, block: int) -> str:
        model = self._model()
        if block >= model.num_blocks:
            return ""
        flags = int(model.flags[block])
        if not flags:
            return f"Block {block:,} is free."
        if not flags & wire.FLAG_USED:
            return f"Block {block:,} is {', '.join(flag_words(flags))}."
        live = f"Block {block:,}: {int(model.live[block])} of {model.block_size} live"
        return ", ".join([live, *flag_words(flags)]) + "."
