"""Who may do what: bearer tokens and their scopes, the server's address, browsers' Origin and Host.

Knows headers and the server's own address, not the engine. Rules (docs/security.md has the table):

1. Two scopes: `read`, and `control`, which may also change. A caller without a token is anonymous.
2. The control token controls, the read token reads. An API key of vLLM, and anonymous callers
   where they are let in, read; they control too while there is no control token and the server is
   local: bound to loopback or a Unix socket.
3. Anonymous callers are let in while there is neither an API key nor a read token, and, with a
   control token, on a local server only. An unknown token is never let in.
4. A browser's page may call only from the same host or from loopback.
5. Bound to loopback, the Host header must name loopback (no DNS rebinding).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from starlette.datastructures import Address, Headers

from vtoken_api.problems import ProblemError, refuse

ACTOR_HEADER = "X-VToken-Actor"
_NOT_NAME = re.compile(r"[^\w.@+-]")
_DIRECTLY = frozenset({"", "same-origin", "same-site", "none"})  # Sec-Fetch-Site

READ_ONLY_TOKEN = "this token may read only; changes need the server's control token"
READ_ONLY_SERVER = (
    "this server is read-only: it is bound to more than loopback and has no control token"
)
READ_ONLY_NO_CONTROL = "this token may read only, and the server has no control token"


class Credential(Enum):
    """What a caller has shown."""

    ANONYMOUS = "none"
    API_KEY = "API key"
    READ = "read token"
    CONTROL = "control token"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a caller may do; `read_only_reason` is empty when it may change things."""

    read_only_reason: str = ""

    @property
    def can_control(self) -> bool:
        return not self.read_only_reason

    def check_control(self) -> None:
        """Raises 403 for a caller that may only read."""
        if not self.can_control:
            raise refuse(
                403,
                self.read_only_reason,
                title="Read-only",
                bound="the token of --vtoken-control-token-file",
            )


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of one server, fixed at start. Tokens are held as hashes only."""

    tokens: Mapping[bytes, Credential]
    loopback: bool  # bound to a loopback address
    unix_socket: bool

    @classmethod
    def of_server(
        cls,
        *,
        host: str | None,
        unix_socket: bool,
        api_keys: Iterable[str] = (),
        read_token: str = "",
        control_token: str = "",
    ) -> Access:
        """`host` as vLLM's `--host`: None is every interface. Raises ValueError for one token with
        two meanings."""
        tokens: dict[bytes, Credential] = {}
        shown = [(key, Credential.API_KEY) for key in api_keys]
        shown += [(read_token, Credential.READ), (control_token, Credential.CONTROL)]
        for token, credential in shown:
            if token and tokens.setdefault(_digest(token), credential) is not credential:
                known = tokens[_digest(token)].value
                raise ValueError(f"{credential.value} and {known} are the same; they must differ")
        return cls(tokens, host is not None and is_loopback(host), unix_socket)

    @property
    def local(self) -> bool:
        """Whether only this machine's users reach the server."""
        return self.loopback or self.unix_socket

    @property
    def needs_token(self) -> bool:
        """Whether anonymous callers stay outside."""
        held = self._held
        if Credential.API_KEY in held or Credential.READ in held:
            return True
        return Credential.CONTROL in held and not self.local

    @property
    def server_read_only_reason(self) -> str:
        """Why nobody at all can change anything; empty when somebody can."""
        held = self._held
        if Credential.CONTROL in held:
            return ""
        if not self.local:
            return READ_ONLY_SERVER
        if Credential.READ in held and Credential.API_KEY not in held:
            return READ_ONLY_NO_CONTROL
        return ""

    def grant(self, authorization: str | None) -> Grant:
        """What the bearer of an Authorization header may do; raises 401."""
        if authorization is None:
            return self._grant_of(Credential.ANONYMOUS)
        scheme, _, token = authorization.partition(" ")
        return self.grant_token(token.strip() if scheme.lower() == "bearer" else "")

    def grant_token(self, token: str) -> Grant:
        """What the bearer of `token` may do; raises 401 for one that is not known."""
        if not self.tokens:  # nothing is asked for, so nothing that is shown can be wrong
            return self._grant_of(Credential.ANONYMOUS)
        digest, found = _digest(token), None
        for expected, credential in self.tokens.items():  # all of them: constant time
            if secrets.compare_digest(digest, expected):
                found = credential
        if found is None:
            raise unauthorized()
        return self._grant_of(found)

    def shows(self, text: str) -> bool:
        """Whether `text` is one of the tokens."""
        return _digest(text) in self.tokens

    def _grant_of(self, credential: Credential) -> Grant:
        if credential is Credential.ANONYMOUS and self.needs_token:
            raise unauthorized()
        if credential is Credential.CONTROL:
            return Grant()
        if Credential.CONTROL in self._held:
            return Grant(READ_ONLY_TOKEN)
        if not self.local:
            return Grant(READ_ONLY_SERVER)
        if credential is Credential.READ:
            return Grant(READ_ONLY_NO_CONTROL)
        return Grant()

    @property
    def _held(self) -> frozenset[Credential]:
        return frozenset(self.tokens.values())

    def check_browser(self, headers: Headers) -> None:
        """Raises 403 for a foreign page, and for a foreign Host on a loopback server."""
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
            # Without CORS a browser sends no Origin with GET, but says that a page made it.
            if headers.get("sec-fetch-site", "").lower() not in _DIRECTLY:
                raise _foreign("Sec-Fetch-Site", headers["sec-fetch-site"])
            return
        page = _page_name(origin)
        if not (is_loopback(page) or (page and page == host)):
            raise _foreign("Origin", origin)


def _foreign(field: str, value: str) -> ProblemError:
    return refuse(
        403,
        "pages of another site may not call this server",
        field=field,
        value=value[:256],
        bound="the same host, or loopback",
    )


def unauthorized() -> ProblemError:
    """401: the token is missing or wrong."""
    return refuse(
        401,
        "a token is needed, in the header or, on the stream, as first message; never in the URL",
        field="Authorization",
        bound="Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )


def actor_of(headers: Headers, client: Address | None) -> str:
    """Who is calling, for the audit log: `name@address`, the name self-declared."""
    address = address_of(client)
    name = _NOT_NAME.sub("", headers.get(ACTOR_HEADER, ""))[:32]
    return f"{name}@{address}" if name else address


def address_of(client: Address | tuple[str, int] | None) -> str:
    """The address of a caller, `local` over a Unix socket."""
    return client[0] if client is not None and client[0] else "local"


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


def _page_name(origin: str) -> str:
    try:
        parts = urlsplit(origin)
        return (parts.hostname or "") if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
