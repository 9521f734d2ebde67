"""The REST client of a replay: refuses every call and says what the recording does not hold."""

from __future__ import annotations

from typing import TypeVar

from vtoken import wire
from vtoken.client import AsyncClient, ProblemError
from vtoken.client.call import Call

T = TypeVar("T")


class OfflineClient(AsyncClient):
    """Raises ProblemError for every call; nothing is ever sent."""

    def __init__(self) -> None:
        """There is no server."""

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def send(self, call: Call[T]) -> T:
        missing = "holds no slots" if call.path.startswith("/blocks/") else "has no server"
        detail = f"A recording {missing}; nothing was sent."
        raise ProblemError(wire.Problem(status=0, title="A recording", detail=detail))
