"""A server's address with engine, token, actor and certificates: one frozen value, validated on
construction.

The token is sent in a header only. An address with a token is refused, and the token is never
printed.
"""

from __future__ import annotations

import contextlib
import getpass
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from vtoken.base import hosts
from vtoken.base.errors import RefusedError

if TYPE_CHECKING:
    import ssl

DEFAULT_URL = "http://127.0.0.1:8000"
PREFIX = "/vtoken/v1"
ACTOR_HEADER = "X-VToken-Actor"
TIMEOUT_S = 15.0  # for the answer to one call
EXPECTED_URL = f"[http://]HOST:PORT, for instance {DEFAULT_URL}"


@dataclass(frozen=True, slots=True)
class Server:
    """`url` is http:// or https://; without a scheme, http://. `actor`, by default the login name,
    is for the audit log. `name` is what rows and sentences about several servers call this one, by
    default HOST:PORT. `cafile`: certificates in PEM, of which one must have signed that of an
    https:// server, or be it; None: those of this system and of SSL_CERT_FILE. `token_source`: what
    errors call the token.

    For a server with several engines: `engine` is the rank of the one that all calls are about.
    Without it, changes are made on all engines, and calls that only read are about `shown`.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    actor: str = ""
    engine: int | None = None
    shown: int | None = field(default=None, repr=False)
    name: str = field(default="", repr=False)
    cafile: str | Path | None = field(default=None, repr=False)
    token_source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url(self.url))
        object.__setattr__(self, "token", _checked_token(self.token))
        if self.cafile is not None:
            _check_cafile(self.cafile)

    @classmethod
    def from_environment(
        cls,
        url: str | None = None,
        *,
        token_file: str | Path | None = None,
        cafile: str | Path | None = None,
        engine: int | None = None,
        name: str = "",
    ) -> Server:
        """`url`, else VTOKEN_URL, else DEFAULT_URL; the token in the file, else VTOKEN_TOKEN;
        `cafile`, else VTOKEN_CAFILE.
        """
        token = os.environ.get("VTOKEN_TOKEN")
        if token_file is not None:
            try:
                token = Path(token_file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise RefusedError(
                    f"cannot read the token file: {error}",
                    field="token_file",
                    value=str(token_file),
                    bound="a text file that holds the token",
                ) from error
        return cls(
            url or os.environ.get("VTOKEN_URL") or DEFAULT_URL,
            token,
            engine=engine,
            name=name,
            cafile=cafile or os.environ.get("VTOKEN_CAFILE") or None,
            token_source=str(token_file or "VTOKEN_TOKEN"),
        )

    @property
    def label(self) -> str:
        """The server's name, else its address without the scheme."""
        return self.name or self.url.partition("://")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, so that no proxy applies."""
        return hosts.is_loopback(urlsplit(self.url).hostname or "")

    @property
    def is_https(self) -> bool:
        return urlsplit(self.url).scheme == "https"

    def tls(self) -> ssl.SSLContext:
        """Checks the certificate of an https:// server; of another one, trusts nobody."""
        import ssl

        if not self.is_https:
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.cafile is not None:
            return ssl.create_default_context(cafile=self.cafile)
        from httpx import create_ssl_context

        context = create_ssl_context(trust_env=False)  # a list of public authorities
        context.load_default_certs()  # the system's, and SSL_CERT_FILE and SSL_CERT_DIR
        return context

    def headers(self) -> dict[str, str]:
        """The headers of every call and every stream."""
        headers = {ACTOR_HEADER: self.actor or _login_name()}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return headers

    def call_url(self, path: str) -> str:
        """The address of a call; `path` is below `/vtoken/v1`."""
        return f"{self.url}{PREFIX}{path}"

    def query(self, *, changes: bool = False) -> dict[str, str]:
        """The query of every stream and every call; `changes`: of one that changes something, or
        that is a dry run of it.
        """
        shown = None if changes else self.shown
        engine = shown if self.engine is None else self.engine
        return {} if engine is None else {"engine": str(engine)}

    def stream_url(self, query: dict[str, str]) -> str:
        """The address of the stream, ws:// or wss://."""
        query = self.query() | query
        url = "ws" + self.call_url("/stream").removeprefix("http")
        return f"{url}?{urlencode(query, safe=',:')}" if query else url


def _checked_url(given: str) -> str:
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise RefusedError(f"not a server: {given!r}", field="url", value=given, bound=EXPECTED_URL)
    if parts.username is not None or parts.query or parts.fragment:
        # The value is not repeated: it may hold a password.
        raise RefusedError(
            "a server's address must have no user, password, query or fragment; put a token into "
            "VTOKEN_TOKEN or a file",
            field="url",
            bound=EXPECTED_URL,
        )
    return url.rstrip("/")


def _checked_token(token: str | None) -> str | None:
    token = (token or "").strip()
    if not token.isascii() or not token.isprintable():
        raise RefusedError(
            "the token has characters that a header cannot carry",
            field="token",
            bound="printable ASCII",
        )
    return token or None


def _check_cafile(cafile: str | Path) -> None:
    import ssl

    try:
        ssl.create_default_context(cafile=cafile)
    except OSError as error:  # also one of TLS
        raise RefusedError(
            f"cannot read certificates from {cafile}: {error.strerror or error}",
            field="cafile",
            value=str(cafile),
            bound="a file with certificates in PEM",
        ) from error


def _login_name() -> str:
    with contextlib.suppress(OSError, KeyError):
        name = getpass.getuser()
        if name.isascii() and name.isprintable():
            return name
    return "unknown"
