"""The asyncio client: the methods of `Client`, to be awaited.

httpx is imported on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, TypeVar

from vtoken.client.answers import no_answer
from vtoken.client.base import BaseClient
from vtoken.client.call import Call, Steps
from vtoken.client.errors import OutcomeUnknown, ProblemError
from vtoken.client.sequences import looked_up
from vtoken.client.stream import ALL_TOPICS, AsyncStream, Format, Topic

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class AsyncClient(BaseClient):
    """One server, for event loops: every method is awaited. Arguments: as of `BaseClient`."""

    _http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def stream(
        self,
        topics: Iterable[Topic] = ALL_TOPICS,
        *,
        fps: float = 10.0,
        format: Format = "msgpack",  # noqa: A002 - the query parameter's name
        resume: str | None = None,
        reconnect: bool = False,
    ) -> AsyncStream:
        """As `Client.stream`, for `async for`."""
        return AsyncStream(self.server, topics, fps, format, resume, reconnect)

    # ------------------------------------------------------------ transport

    async def send(self, call: Call[T]) -> T:
        """Send one call and return the decoded answer."""
        try:
            return await self._exchange(call)
        except OutcomeUnknown as lost:
            if not self.lookup_s:
                raise
            self.on_lookup(lost)
            found: T = await self.run(looked_up(lost, self.lookup_s))
            return found

    async def _exchange(self, call: Call[T]) -> T:
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(**self._options())
        try:
            response = await self._http.request(**self._request(call))
        except httpx.HTTPError as error:
            raise no_answer(self.server, call, error, self.timeout_s) from error
        return self._answer(call, response)

    async def run(self, sequence: Steps[T]) -> T:
        """Make the calls of a sequence and return its result."""
        answered: object = None
        failed: ProblemError | None = None
        while True:
            try:
                step = sequence.send(answered) if failed is None else sequence.throw(failed)
            except StopIteration as end:
                result: T = end.value
                return result
            answered = failed = None
            if isinstance(step, Call):
                try:
                    answered = await self.send(step)
                except ProblemError as error:
                    failed = error
            else:
                await asyncio.sleep(step)
