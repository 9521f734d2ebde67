"""The REST client of a replay: refuses every call and says what the recording does not hold."""

from __future__ import annotations

from typing import TypeVar

from vtoken import wire
from vtoken.client import AsyncClient, ProblemError
from vtoken.client.call import Call

T = TypeVar("T")
MISSING = {
    "requests": "it holds the request's table row, not its text, tokens and blocks.",
    "blocks": "it holds no slots.",
}


class OfflineClient(AsyncClient):
    """Raises ProblemError for every call; nothing is ever sent."""

    def __init__(self) -> None:
        """There is no server."""

    async def aclose(self) -> None:
        """There is nothing to close."""

    async def send(self, call: Call[T]) -> T:
        resource = call.path.strip("/").partition("/")[0]
        detail = MISSING.get(resource, "there is no server; nothing was sent")
        problem = wire.Problem(status=0, title="This is a recording", detail=detail)
        raise ProblemError(problem)
