"""The synchronous client: every call as a method that returns the wire document.

httpx is imported on first use.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, TypeVar

from vtoken.client.answers import no_answer
from vtoken.client.base import BaseClient
from vtoken.client.call import Call, Steps
from vtoken.client.errors import OutcomeUnknown, ProblemError
from vtoken.client.sequences import looked_up
from vtoken.client.stream import ALL_TOPICS, AsyncStream, Format, Stream, Topic

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Client(BaseClient):
    """One server, for scripts: every method returns the answer. Arguments: as of `BaseClient`.

    A client is thread-safe.
    """

    _http: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def stream(
        self,
        topics: Iterable[Topic] = ALL_TOPICS,
        *,
        fps: float = 10.0,
        format: Format = "msgpack",  # noqa: A002 - the query parameter's name
        resume: str | None = None,
        reconnect: bool = False,
    ) -> Stream:
        """Iterate over messages, at most `fps` states a second; connects on the first one.

        `resume`: EPOCH:SEQ of the last event seen, see `Stream.place`. `reconnect`: reconnect after
        a loss and resume there. Every connection begins with a `hello`, whose `resumed` is true if
        no event was missed, and a `snapshot`. Without `reconnect`, a loss raises StreamClosed.
        """
        return Stream(AsyncStream(self.server, topics, fps, format, resume, reconnect))

    # ------------------------------------------------------------ transport

    def send(self, call: Call[T]) -> T:
        """Send one call and return the decoded answer."""
        try:
            return self._exchange(call)
        except OutcomeUnknown as lost:
            if not self.lookup_s:
                raise
            self.on_lookup(lost)
            found: T = self.run(looked_up(lost, self.lookup_s))
            return found

    def _exchange(self, call: Call[T]) -> T:
        import httpx

        if self._http is None:
            self._http = httpx.Client(**self._options())
        try:
            response = self._http.request(**self._request(call))
        except httpx.HTTPError as error:
            raise no_answer(self.server, call, error, self.timeout_s) from error
        return self._answer(call, response)

    def run(self, sequence: Steps[T]) -> T:
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
                    answered = self.send(step)
                except ProblemError as error:
                    failed = error
            else:
                time.sleep(step)
