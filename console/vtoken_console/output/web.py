"""The console in a browser: textual-serve, each tab with a console process of its own.

Knows textual-serve and processes, no vToken data. It is for this machine alone, and looks without
touching unless a token was given; then whoever opens it must have the page key (`web_login`), since
every user of this machine reaches the port.

1. It listens on loopback, and answers to loopback names only (no DNS rebinding).
2. A page of another origin cannot open the websocket.
3. At most MAX_TABS consoles run; a closed tab ends its own.
4. No secret is in an address or on a command line: a token is in the environment of the consoles.
5. Where consoles can act, nothing but the login page and static files is served without a cookie.
6. Nothing is fetched from another host: fonts and scripts come from here.
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

from vtoken_console.output.web_login import KeyFile, LoginGate, has_terminal, say_on_terminal

MAX_TABS = 8
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without any, a form says that its origin is null
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
        self,
        command: Sequence[str],
        *,
        host: str,
        port: int,
        max_tabs: int = MAX_TABS,
        gate: LoginGate | None = None,
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
        self._gate = gate
        self._cookie = f"vtoken_console_{port}"

    def initialize_logging(self) -> None:
        logging.basicConfig(level=logging.WARNING)

    async def on_startup(self, app: web.Application) -> None:
        """Says where it is, once it can be reached."""
        del app

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._admit)
        app.router.add_post("/login", self.handle_login)
        app.on_response_prepare.append(_add_headers)
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises 403 for a foreign Host or the page of a foreign origin, 401 without the cookie."""
        host = urlsplit(f"//{request.host}").hostname or ""
        if not is_loopback(host):
            raise web.HTTPForbidden(text="this console answers to loopback names only\n")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="pages of another site may not open this console\n")
        open_to_all = request.path in ("/", "/login") or request.path.startswith("/static/")
        if not open_to_all and not self._is_admitted(request):
            raise web.HTTPUnauthorized(text="the page key is needed: open / in a browser\n")
        return await handler(request)

    def _is_admitted(self, request: web.Request) -> bool:
        return self._gate is None or self._gate.admits(request.cookies.get(self._cookie, ""))

    async def handle_index(self, request: web.Request) -> web.Response:
        """The page; its addresses are relative, so that it also works behind a forwarded port."""
        if not self._is_admitted(request):
            return self._page("login.html", request, wrong=False)
        return self._page("app_index.html", request, max_tabs=self.max_tabs)

    async def handle_login(self, request: web.Request) -> web.Response:
        """The page key, typed: a cookie for this browser; raises 303 to the console."""
        typed = (await request.post()).get("key", "")
        cookie = None
        if self._gate is not None and isinstance(typed, str):
            cookie = self._gate.open_with(typed)
        if self._gate is not None and cookie is None:
            return self._page("login.html", request, status=403, wrong=True)
        there = web.Response(status=303, headers={"Location": "/"})
        if cookie is not None:
            there.set_cookie(self._cookie, cookie, httponly=True, samesite="Strict")
        return there

    def _page(
        self, name: str, request: web.Request, status: int = 200, **values: Any
    ) -> web.Response:
        told = {"title": self.title, **values}
        page: web.Response = aiohttp_jinja2.render_template(name, request, told, status=status)
        return page

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
    """Serves until interrupted; raises OSError when the port is taken, or a key cannot be told."""
    if token is not None:
        os.environ["VTOKEN_TOKEN"] = token
    file = KeyFile(port) if can_control and not has_terminal() else None
    try:
        gate = LoginGate(file.write if file else say_on_terminal) if can_control else None
        server = WebConsole(command, host=host, port=port, gate=gate)
        what = "can act" if can_control else "read-only"
        print(f"console at {server.public_url} ({what}); ctrl+c ends it", flush=True)
        if file is not None:
            print(f"page key, for one browser, in {file.path}", flush=True)
        server.serve()
    finally:
        if file is not None:
            file.close()
    return 0
