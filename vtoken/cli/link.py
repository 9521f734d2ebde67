"""The way to the server: address, token, calls that answer wire documents, the stream's messages.

Knows HTTP and the websocket, not what is shown. Everything that goes wrong is a CommandError.
"""

from __future__ import annotations

import contextlib
import getpass
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec

from vtoken import wire
from vtoken.cli.errors import CommandError, ProblemError, UsageError
from vtoken.cli.parser import DEFAULT_URL

PREFIX = "/vtoken/v1"
TIMEOUT_S = 15.0
JSON = {"Content-Type": "application/json"}

T = TypeVar("T")


def url_of(arguments: Namespace) -> str:
    """`--url`, VTOKEN_URL or the default, checked."""
    url: str = arguments.url or os.environ.get("VTOKEN_URL") or DEFAULT_URL
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"not a server: {url!r}", f"expected http://HOST:PORT, as {DEFAULT_URL}")
    return url.rstrip("/")


def token_of(arguments: Namespace) -> str | None:
    """The token of `--token-file` or VTOKEN_TOKEN; never an argument, where others can read it."""
    token = os.environ.get("VTOKEN_TOKEN", "")
    if arguments.token_file is not None:
        try:
            token = Path(arguments.token_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the token file: {error}") from error
    token = token.strip()
    if not token.isascii() or not token.isprintable():
        raise UsageError("the token has characters that a header cannot carry")
    return token or None


class Link:
    """One server, for one command."""

    def __init__(self, arguments: Namespace) -> None:
        self.url = url_of(arguments)
        self._local = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        self._headers = {"X-VToken-Actor": _user()}
        if token := token_of(arguments):
            self._headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=TIMEOUT_S,
            trust_env=not self._local,  # no proxy on the way to this machine
        )

    def call(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> T:
        """The document that the server answers; raises CommandError."""
        content = None if body is None else msgspec.json.encode(body)
        sent = {**(JSON if content else {}), **(headers or {})}
        try:
            answer = self._http.request(
                method, PREFIX + path, content=content, params=params, headers=sent
            )
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.TimeoutException as error:
            raise CommandError(f"no answer from {self.url} within {TIMEOUT_S:g} s") from error
        except httpx.HTTPError as error:
            raise CommandError(f"{self.url}: {error}") from error
        if not answer.is_success:
            raise self._refused(answer.status_code, answer.headers, answer.content)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise CommandError(f"{method} {path}: unexpected answer: {error}") from error

    def stream(self, **query: str) -> Iterator[tuple[str, wire.StreamMessage]]:
        """Messages of the stream, as JSON text and decoded; its end is a CommandError."""
        from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        address = f"{self.url.replace('http', 'ws', 1)}{PREFIX}/stream?{urlencode(query, safe=',')}"
        decoder = msgspec.json.Decoder(wire.StreamMessage)
        try:
            with connect(
                address,
                additional_headers=self._headers,
                compression=None,
                max_size=None,
                proxy=None if self._local else True,
            ) as socket:
                for text in socket:
                    assert isinstance(text, str)
                    yield text, decoder.decode(text)
        except InvalidStatus as error:
            response = error.response
            headers = httpx.Headers(list(response.headers.raw_items()))
            raise self._refused(
                response.status_code, headers, bytes(response.body or b"")
            ) from error
        except ConnectionClosed as error:
            reason = error.rcvd.reason if error.rcvd is not None else ""
            raise CommandError(f"the stream has ended: {reason or 'connection lost'}") from error
        except ConnectionRefusedError as error:
            raise self._unreachable(error) from error
        except (OSError, WebSocketException, msgspec.DecodeError) as error:
            raise CommandError(f"the stream broke: {error}") from error
        raise CommandError("the stream has ended: the server closed it")

    def _unreachable(self, error: Exception) -> CommandError:
        return CommandError(
            f"cannot reach {self.url}: {error}",
            "start a server with: vtoken serve MODEL\nor name another with --url or VTOKEN_URL",
        )

    def _refused(self, status: int, headers: httpx.Headers, content: bytes) -> CommandError:
        if headers.get("content-type") == "application/problem+json":
            with contextlib.suppress(msgspec.DecodeError):
                problem = msgspec.json.decode(content, type=wire.Problem)
                if status == 401:
                    return CommandError(
                        problem.detail, "set VTOKEN_TOKEN, or pass --token-file FILE"
                    )
                return ProblemError(problem)
        if status == 404:
            return CommandError(
                f"{self.url} answers, but has no {PREFIX}: vToken is not on there",
                "start the server with: vtoken serve MODEL",
            )
        return CommandError(f"{self.url} answers with HTTP status {status}")


def _user() -> str:
    with contextlib.suppress(OSError, KeyError):
        name = getpass.getuser()
        if name.isascii() and name.isprintable():
            return name
    return "unknown"
