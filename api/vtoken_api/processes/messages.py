"""What one API process asks the owner over their Unix socket, and what the owner answers.

A message is its length, four bytes, and msgpack. A connection carries one question. The answer to a
`Call` is a `Head` and pieces of the body; every other question has one answer. Both ends are
processes of one server, so of one release.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive

from vtoken import wire

LENGTH_BYTES = 4
AGAIN = "vtoken.again"  # key of the scope of a call whose answer an earlier owner did not give

T = TypeVar("T")


class Scope(msgspec.Struct, frozen=True):
    """A call's ASGI scope, as far as vToken's application reads it."""

    type: str
    path: str
    raw_path: bytes
    query_string: bytes
    root_path: str
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    scheme: str
    http_version: str = "1.1"
    method: str = "GET"

    @staticmethod
    def of(scope: MutableMapping[str, Any]) -> Scope:
        """The part of a server's scope that is passed on."""
        client = scope.get("client")
        return Scope(
            type=scope["type"],
            path=scope["path"],
            raw_path=scope.get("raw_path") or b"",
            query_string=scope.get("query_string", b""),
            root_path=scope.get("root_path", ""),
            headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
            client=None if client is None else (client[0], client[1]),
            scheme=scope.get("scheme", "http"),
            http_version=scope.get("http_version", "1.1"),
            method=scope.get("method", "GET"),
        )

    def as_dict(self) -> dict[str, Any]:
        """The scope for the application."""
        asgi = {"version": "3.0", "spec_version": "2.3"}
        return {**msgspec.structs.asdict(self), "asgi": asgi, "extensions": {}}


class Call(msgspec.Struct, tag=True):
    """Answer a call. `stalled`: its body did not come to its end in time."""

    scope: Scope
    body: bytes = b""
    stalled: bool = False
    again: bool = False  # an earlier owner may have handled it


def replay(call: Call, rest: Receive) -> Receive:
    """The `receive` of a call whose body was read already; `rest` follows the body."""
    unread = True

    async def replayed() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": call.body, "more_body": call.stalled}
        if call.stalled:
            raise TimeoutError  # as the reader's own limit does
        return await rest()

    return replayed


class Admission(msgspec.Struct, tag=True):
    """May this websocket be opened? The asking process serves it."""

    scope: Scope


class Scrape(msgspec.Struct, tag=True):
    """vToken's metrics, please."""


class HealthQuestion(msgspec.Struct, tag=True):
    """How are the audit log and the flight recorders?"""


Question = Call | Admission | Scrape | HealthQuestion


class Head(msgspec.Struct, tag=True):
    status: int
    headers: list[tuple[bytes, bytes]]


class Piece(msgspec.Struct, tag=True):
    """The last one says so: an owner that ends after it has left nothing open."""

    data: bytes
    more: bool = False


class Verdict(msgspec.Struct, tag=True):
    """Of an `Admission`; None: it may be opened."""

    problem: wire.Problem | None
    headers: dict[str, str] | None = None


class HealthAnswer(msgspec.Struct, tag=True):
    """By the rank of the engine."""

    engines: dict[int, list[wire.Health]]


Answer = Head | Piece | Verdict | HealthAnswer


class Line:
    """One connection between two API processes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, message: Question | Answer) -> None:
        """Raises OSError if the other end is gone."""
        payload = msgspec.msgpack.encode(message)
        self._writer.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
        await self._writer.drain()

    async def receive(self, kind: type[T] | Any) -> T:
        """Raises OSError or asyncio.IncompleteReadError if the other end is gone."""
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        payload = await self._reader.readexactly(length)
        message: T = msgspec.msgpack.decode(payload, type=kind)
        return message

    async def closed(self) -> None:
        """Wait until the other end closes the connection."""
        await self._reader.read()

    def close(self) -> None:
        self._writer.close()
