"""Access rules: bearer tokens and their scopes, the server's address, browsers' Origin and Host.

The rules (docs/security.md has the table):

1. There are two scopes: `read`, and `control`, which includes `read`. A caller without a token is
   anonymous.
2. The control token grants control, the read token grants read. A vLLM API key, and an anonymous
   caller where one is admitted, grants read; it also grants control while the server has no control
   token and is local, that is, bound to loopback or to a Unix socket.
3. Anonymous callers are admitted while the server has neither an API key nor a read token; if it
   has a control token, only on a local server. An unknown token is always refused.
4. A web page may call only from the same host or from loopback.
5. On a server bound to loopback, the Host header must name loopback (no DNS rebinding).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Address, Headers

from vtoken.base.hosts import is_loopback
from vtoken_api.problems import ProblemError, refuse

ACTOR_HEADER = "X-VToken-Actor"
_NOT_IN_NAME = re.compile(r"[^\w.@+-]")
_SAME_SITE = frozenset({"", "same-origin", "same-site", "none"})  # Sec-Fetch-Site

READ_ONLY_TOKEN = "this token is read-only; changes need the server's control token"
READ_ONLY_SERVER = (
    "this server is read-only: it is bound to more than loopback and has no control token"
)
READ_ONLY_NO_CONTROL = "this token is read-only, and the server has no control token"


class Credential(Enum):
    """The kind of credential that a caller presented."""

    ANONYMOUS = "none"
    API_KEY = "API key"
    READ = "read token"
    CONTROL = "control token"


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a caller; `read_only_reason` is empty if the caller has control.

    `token_ignored`: a token came, and the server has none to compare it with.
    """

    read_only_reason: str = ""
    token_ignored: bool = False

    @property
    def can_control(self) -> bool:
        return not self.read_only_reason

    def check_control(self) -> None:
        """Raises 403 for a read-only caller."""
        if not self.can_control:
            raise refuse(
                403,
                self.read_only_reason,
                title="Read-only",
                bound="the token of --vtoken-control-token-file",
            )


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules of one server, fixed at start. Only hashes of the tokens are kept."""

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
        """`host` as in vLLM's `--host`: None is every interface. Raises ValueError if two
        credentials have the same token."""
        tokens: dict[bytes, Credential] = {}
        presented = [(key, Credential.API_KEY) for key in api_keys]
        presented += [(read_token, Credential.READ), (control_token, Credential.CONTROL)]
        for token, credential in presented:
            if token and tokens.setdefault(_digest(token), credential) is not credential:
                known = tokens[_digest(token)].value
                raise ValueError(f"{credential.value} and {known} are the same; they must differ")
        return cls(tokens, host is not None and is_loopback(host), unix_socket)

    @property
    def needs_token(self) -> bool:
        """Whether anonymous callers are refused."""
        held = {*self.tokens.values()}
        return bool(held) and not (self._local and held == {Credential.CONTROL})

    @property
    def server_read_only_reason(self) -> str:
        """Why no caller can have control; empty if some caller can."""
        callers = [*self.tokens.values(), *([] if self.needs_token else [Credential.ANONYMOUS])]
        reasons = [self._read_only_reason(caller) for caller in callers]
        return reasons[0] if all(reasons) else ""

    def grant(self, authorization: str | None) -> Grant:
        """The rights of an Authorization header; raises 401."""
        if authorization is None:
            return self._grant_of(Credential.ANONYMOUS)
        scheme, _, token = authorization.partition(" ")
        return self.grant_token(token.strip() if scheme.lower() == "bearer" else "")

    def grant_token(self, token: str) -> Grant:
        """The rights of `token`; raises 401 if it is unknown."""
        if not self.tokens:  # the server requires no token, so any is accepted
            return replace(self._grant_of(Credential.ANONYMOUS), token_ignored=True)
        digest, found = _digest(token), None
        for expected, credential in self.tokens.items():  # no early exit: constant time
            if secrets.compare_digest(digest, expected):
                found = credential
        if found is None:
            raise unauthorized("the token is not one of this server's")
        return self._grant_of(found)

    def is_token(self, text: str) -> bool:
        """Whether `text` is one of the server's tokens."""
        return _digest(text) in self.tokens

    def _grant_of(self, credential: Credential) -> Grant:
        if credential is Credential.ANONYMOUS and self.needs_token:
            raise unauthorized("this server needs a token")
        return Grant(self._read_only_reason(credential))

    def _read_only_reason(self, credential: Credential) -> str:
        if credential is Credential.CONTROL:
            return ""
        if Credential.CONTROL in self.tokens.values():
            return READ_ONLY_TOKEN
        if not self._local:
            return READ_ONLY_SERVER
        return READ_ONLY_NO_CONTROL if credential is Credential.READ else ""

    @property
    def _local(self) -> bool:
        """Whether only users of this machine can reach the server."""
        return self.loopback or self.unix_socket

    def check_browser(self, headers: Headers) -> None:
        """Raises 403 for a page of another site, and for another Host on a loopback server."""
        host = _split(f"//{headers.get('host', '')}").hostname or ""
        if self.loopback and not is_loopback(host):
            raise refuse(
                403,
                "this server accepts loopback host names only",
                field="Host",
                value=host,
                bound="localhost, 127.0.0.0/8 or ::1",
            )
        origin = headers.get("origin")
        if origin is None:
            # For a GET without CORS, a browser sends Sec-Fetch-Site but no Origin.
            if headers.get("sec-fetch-site", "").lower() not in _SAME_SITE:
                raise _cross_site("Sec-Fetch-Site", headers["sec-fetch-site"])
            return
        parts = _split(origin)
        page = (parts.hostname or "") if parts.scheme in ("http", "https") else ""
        if not (is_loopback(page) or (page and page == host)):
            raise _cross_site("Origin", origin)


def _cross_site(field: str, value: str) -> ProblemError:
    return refuse(
        403,
        "pages of another site may not call this server",
        field=field,
        value=value[:256],
        bound="the same host, or loopback",
    )


def unauthorized(why: str) -> ProblemError:
    """401: the token is missing or wrong."""
    return refuse(
        401,
        f"{why}: send it in the header, or as the first message of the stream; never in the URL",
        field="Authorization",
        bound="Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )


def actor_of(headers: Headers, client: Address | None) -> str:
    """The caller's name in the audit log: `name@address`; the name is self-declared."""
    address = address_of(client)
    name = _NOT_IN_NAME.sub("", headers.get(ACTOR_HEADER, ""))[:32]
    return f"{name}@{address}" if name else address


def address_of(client: Address | tuple[str, int] | None) -> str:
    """The address of a caller; `local` over a Unix socket."""
    return client[0] if client is not None and client[0] else "local"


def _split(url: str) -> SplitResult:
    """The parts of an address, all empty if it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
