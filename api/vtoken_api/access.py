"""Who may do what: bearer tokens, the address the server is bound to, browsers' Origin and Host.

Knows headers and the server's own address, not the engine. Rules:

1. with an API key set, every call needs `Authorization: Bearer KEY` (vLLM guards `/v1` only);
2. bound to anything but loopback or a Unix socket, nothing can be changed;
3. a browser's page may call only from the same host or from loopback;
4. bound to loopback, the Host header must name loopback (no DNS rebinding).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Address, Headers

from vtoken_api.problems import ProblemError, refuse

ACTOR_HEADER = "X-VToken-Actor"
_NOT_NAME = re.compile(r"[^\w.@+-]")


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of one server, fixed at start."""

    token_hashes: tuple[bytes, ...]
    loopback: bool  # bound to a loopback address
    unix_socket: bool

    @classmethod
    def of_server(
        cls, *, host: str | None, unix_socket: bool, tokens: Iterable[str] = ()
    ) -> Access:
        """`host` as vLLM's `--host`: None is every interface."""
        return cls(
            token_hashes=tuple(_digest(token) for token in tokens if token),
            loopback=host is not None and is_loopback(host),
            unix_socket=unix_socket,
        )

    @property
    def needs_token(self) -> bool:
        return bool(self.token_hashes)

    @property
    def can_control(self) -> bool:
        """Whether this server takes changes at all."""
        return self.loopback or self.unix_socket

    def check_browser(self, headers: Headers) -> None:
        """Raises 403 for a foreign Origin, and for a foreign Host on a loopback server."""
        host = _host_name(headers.get("host", ""))
        if self.loopback and not is_loopback(host):
            raise refuse(
                403,
                "this server answers to loopback names only",
                field="Host",
                value=host,
                bound="localhost, 127.0.0.0/8 or ::1",
            )
        origin = headers.get("origin")
        if origin is None:
            return
        page = urlsplit(origin).hostname or ""
        if not (is_loopback(page) or (page and page == host)):
            raise refuse(
                403,
                "pages of another site may not call this server",
                field="Origin",
                value=origin,
                bound="the same host, or loopback",
            )

    def check_token(self, headers: Headers) -> None:
        """Raises 401 unless a token is not needed, or the right one was sent."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if self.needs_token and not (scheme.lower() == "bearer" and self.knows(token)):
            raise unauthorized()

    def knows(self, token: str) -> bool:
        """Whether `token` is one of the server's, compared in constant time."""
        digest, known = _digest(token), False
        for expected in self.token_hashes:
            known |= secrets.compare_digest(digest, expected)
        return known

    def check_control(self) -> None:
        """Raises 403 on a read-only server."""
        if not self.can_control:
            raise refuse(
                403,
                "this server is read-only, because it is bound to more than loopback",
                title="Read-only",
                bound="serve with --host 127.0.0.1",
            )


def unauthorized() -> ProblemError:
    """401: the token is missing or wrong."""
    return refuse(
        401,
        "an API key is needed: Authorization: Bearer KEY",
        field="Authorization",
        headers={"WWW-Authenticate": "Bearer"},
    )


def actor_of(headers: Headers, client: Address | None) -> str:
    """Who is calling, for the audit log: `name@address`, the name self-declared."""
    address = client.host if client is not None and client.host else "local"
    name = _NOT_NAME.sub("", headers.get(ACTOR_HEADER, ""))[:32]
    return f"{name}@{address}" if name else address


def is_loopback(host: str) -> bool:
    """Whether a host name or an IP address is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
