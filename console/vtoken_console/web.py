"""The console in a browser: textual-serve, each tab with a console process of its own.

Knows textual-serve and processes, no vToken data. The page has no login, so it is for this machine
alone, and looks without touching unless a token was given.

1. It listens on loopback, and answers to loopback names only (no DNS rebinding).
2. A page of another origin cannot open the websocket.
3. At most MAX_TABS consoles run; a closed tab ends its own.
4. No secret is in an address or on a command line: a token is in the environment of the consoles.
5. Nothing is fetched from another host: fonts and scripts come from here.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp_jinja2
from aiohttp import web
from textual_serve.server import Server

MAX_TABS = 8
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class WebConsole(Server):
    """Serves `command`, once a tab, at http://`host`:`port`."""

    def __init__(
        self, command: Sequence[str], *, host: str, port: int, max_tabs: int = MAX_TABS
    ) -> None:
        super().__init__(
            shlex.join(command),
            host=host,
            port=port,
            title="vToken console",
            templates_path=Path(__file__).parent / "web_page",
        )
        self.max_tabs = max_tabs
        self.num_tabs = 0

    def initialize_logging(self) -> None:
        logging.basicConfig(level=logging.WARNING)

    async def on_startup(self, app: web.Application) -> None:
        """Says where it is, once it can be reached."""
        del app

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._admit)
        app.on_response_prepare.append(_add_headers)
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises 403 for a foreign Host, and for the page of a foreign origin."""
        host = urlsplit(f"//{request.host}").hostname or ""
        if not is_loopback(host):
            raise web.HTTPForbidden(text="this console answers to loopback names only\n")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="pages of another site may not open this console\n")
        return await handler(request)

    @aiohttp_jinja2.template("app_index.html")
    async def handle_index(self, request: web.Request) -> dict[str, Any]:
        """The page; its addresses are relative, so that it also works behind a forwarded port."""
        return {"title": self.title, "max_tabs": self.max_tabs}

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """One tab; raises 503 when there are too many."""
        if self.num_tabs >= self.max_tabs:
            raise web.HTTPServiceUnavailable(text=f"{self.max_tabs} consoles are open already\n")
        self.num_tabs += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self.num_tabs -= 1


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def run(
    command: Sequence[str], *, host: str, port: int, token: str | None, can_control: bool
) -> int:
    """Serves until interrupted; raises OSError when the port is taken."""
    if token is not None:
        os.environ["VTOKEN_TOKEN"] = token
    server = WebConsole(command, host=host, port=port)
    what = "can act" if can_control else "read-only"
    print(f"console at {server.public_url} ({what}); ctrl+c ends it", flush=True)
    server.serve()
    return 0
