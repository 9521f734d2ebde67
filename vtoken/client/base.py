"""What both clients are: their server, their methods, and what an answer becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vtoken.client import request_text, sequences
from vtoken.client.answers import answer, token_ignored
from vtoken.client.call import Call
from vtoken.client.calls import Calls
from vtoken.client.errors import OutcomeUnknown
from vtoken.client.methods import run
from vtoken.client.server import TIMEOUT_S, Server

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class BaseClient(Calls):
    """One server. Every method raises ProblemError; a refused call has changed nothing. Whether a
    change without an answer was applied is looked up for `lookup_s` seconds, after a call of
    `on_lookup`; by default OutcomeUnknown is raised at once.

    `server`: its address, a `Server` with a token, or None for VTOKEN_URL and VTOKEN_TOKEN of the
    environment.
    """

    def __init__(
        self,
        server: Server | str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        lookup_s: float = 0.0,
        on_lookup: Callable[[OutcomeUnknown], None] = lambda _: None,
    ) -> None:
        if server is None:
            server = Server.from_environment()
        self.server = Server(server) if isinstance(server, str) else server
        self.timeout_s = timeout_s
        self.lookup_s = lookup_s
        self.on_lookup = on_lookup
        self.token_ignored = False  # by the newest answer

    wait_operation = run(sequences.wait_operation)
    wait_change = run(sequences.wait_change)
    token_pages = run(sequences.token_pages)
    refresh_text = run(request_text.refresh_text)
    newest_events = run(sequences.newest_events)

    def _options(self) -> dict[str, Any]:
        """Of the HTTP connections."""
        return {
            "headers": self.server.headers(),
            "timeout": self.timeout_s,
            "trust_env": not self.server.is_loopback,  # no proxy
            "verify": self.server.tls(),
        }

    def _request(self, call: Call[Any]) -> dict[str, Any]:
        """The HTTP request of a call."""
        return {
            "method": call.route.method,
            "url": self.server.call_url(call.path),
            "params": call.query(self.server),
            "headers": call.headers,
            "content": call.content,
        }

    def _answer(self, call: Call[T], response: httpx.Response) -> T:
        """The document in a response; raises ProblemError."""
        self.token_ignored = token_ignored(response.headers)
        return answer(self.server, call, response)
