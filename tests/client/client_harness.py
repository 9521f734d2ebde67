"""Both clients behind one face."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any, Self

from vtoken import wire
from vtoken.client import AsyncClient, AsyncStream, Client, Server


class Either:
    """`await either.ask("status")`: by the sync client, in a thread, or by the async one."""

    def __init__(self, kind: type[Client | AsyncClient], server: Server) -> None:
        self.client = kind(server, timeout_s=5.0)

    async def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.client, name)
        if isinstance(self.client, AsyncClient):
            return await method(*args, **kwargs)
        return await asyncio.to_thread(method, *args, **kwargs)

    async def all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Everything that an iterating method yields."""
        found = getattr(self.client, name)(*args, **kwargs)
        if isinstance(self.client, AsyncClient):
            return [item async for item in found]
        return await asyncio.to_thread(list, found)

    async def take(self, count: int, **query: Any) -> list[wire.StreamMessage]:
        """The first messages of a stream."""
        stream = self.client.stream(**query)
        if isinstance(stream, AsyncStream):
            async with stream:
                return [await anext(stream) for _ in range(count)]
        with stream:
            return await asyncio.to_thread(lambda: list(islice(stream, count)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if isinstance(self.client, AsyncClient):
            await self.client.aclose()
        else:
            self.client.close()
