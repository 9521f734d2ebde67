"""Both clients behind one interface."""

from __future__ import annotations

import asyncio
from typing import Any, Self, TypeVar

from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.client import AsyncClient, AsyncStream, Client, Server, Stream

M = TypeVar("M", bound=wire.Message)


class Either:
    """`await either.ask("status")`: by the sync client, in a thread, or by the async one."""

    def __init__(self, kind: type[Client | AsyncClient], server: Server) -> None:
        self.client = kind(server, timeout_s=LIMIT_S)

    async def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.client, name)
        if isinstance(self.client, AsyncClient):
            return await method(*args, **kwargs)
        return await asyncio.to_thread(method, *args, **kwargs)

    def stream(self, *topics: Any, **query: Any) -> Streaming:
        return Streaming(self.client.stream(*topics, **query))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if isinstance(self.client, AsyncClient):
            await self.client.aclose()
        else:
            self.client.close()


class Streaming:
    """`await streaming.next()`: the next message, by either kind of stream."""

    def __init__(self, stream: Stream | AsyncStream) -> None:
        self.stream = stream

    async def next(self) -> wire.StreamMessage:
        async with asyncio.timeout(LIMIT_S):
            if isinstance(self.stream, AsyncStream):
                return await anext(self.stream)
            return await asyncio.to_thread(next, self.stream)

    async def until(self, kind: type[M]) -> M:
        """The next message of `kind`; skips all others."""
        while True:
            message = await self.next()
            if isinstance(message, kind):
                return message

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if isinstance(self.stream, AsyncStream):
            await self.stream.aclose()
        else:
            await asyncio.to_thread(self.stream.close)  # the server of a test has this thread
