"""One REST call as a plain value, and operations that make several.

The sync and the async client send the same values, so what a call is does not depend on either.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from vtoken.client.server import Server
from vtoken.wire.routes import Route, fields_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call; `decode` turns the body of a successful response into the answer."""

    route: Route[Any]
    path: str  # below /vtoken/v1
    decode: Callable[[bytes], T]
    params: dict[str, str]
    headers: dict[str, str]
    content: bytes | None = None
    change_id: str | None = None  # names a call that changes something, see `change`

    def query(self, server: Server) -> dict[str, str]:
        """The query at `server`: that of the call, and the engine that it is about."""
        if self.route.everywhere or "engine" not in fields_of(self.route.query):
            return self.params
        return server.query(changes=self.route.changes) | self.params


Pause: TypeAlias = float  # seconds to sleep before the next call
Steps: TypeAlias = Generator[Call[Any] | Pause, Any, T]  # is sent the answer; returns the result
