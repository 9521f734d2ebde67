"""Serves the console to browsers with textual-serve; each tab runs its own console process.

`/?request=ID` opens a request's page. A narrow screen has NARROW columns.

The server is for this machine only. Consoles are read-only unless a token is given. With a token,
a browser must log in with the page key (`web_login`), because every local user can reach the port.

1. The server listens on loopback and accepts loopback host names only (no DNS rebinding).
2. Pages of other origins cannot open the websocket.
3. At most MAX_TABS consoles run; closing a tab ends its console.
4. No secret is in a URL or on a command line; consoles read the token from their environment.
5. If consoles can act, only the login page and static files are served without a cookie.
6. The page loads nothing from other hosts: fonts and scripts are served from here.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp_jinja2
from aiohttp import web
from textual_serve.server import Server

from vtoken.base.hosts import is_loopback
from vtoken_console.output.web_login import KeyFile, LoginGate, has_terminal, print_key

MAX_TABS = 8
NARROW = 60  # columns, fewest that the console has a layout for
REQUEST_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)  # or its first characters
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send Origin: null for forms
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebConsole(Server):
    """Serves http://`host`:`port` and runs `command` once for each tab."""

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
        """Adds the checks, in place of textual-serve's banner; `run` prints the address."""
        app.middlewares.append(self._admit)
        app.router.add_post("/login", self.handle_login)
        app.router.add_get("/ws/{request_id}", self.handle_websocket)
        app.on_response_prepare.append(_add_headers)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises 403 for a foreign Host or Origin, 401 without the login cookie."""
        host = urlsplit(f"//{request.host}").hostname or ""
        if not is_loopback(host):
            raise web.HTTPForbidden(text="this console accepts loopback host names only\n")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="pages of another site may not open this console\n")
        is_public = request.path in ("/", "/login") or request.path.startswith("/static/")
        if not is_public and not self._is_admitted(request):
            raise web.HTTPUnauthorized(text="the page key is required: open / in a browser\n")
        return await handler(request)

    def _is_admitted(self, request: web.Request) -> bool:
        return self._gate is None or self._gate.admits(request.cookies.get(self._cookie, ""))

    async def handle_index(self, request: web.Request) -> web.Response:
        """The page. Its URLs are relative, so it also works behind a forwarded port."""
        if not self._is_admitted(request):
            return self._page("login.html", request, wrong=False)
        return self._page("app_index.html", request, max_tabs=self.max_tabs, narrow=NARROW)

    async def handle_login(self, request: web.Request) -> web.Response:
        """Exchanges the page key for a cookie and redirects (303) to the console."""
        typed = (await request.post()).get("key", "")
        cookie = None
        if self._gate is not None and isinstance(typed, str):
            cookie = self._gate.open_with(typed)
        if self._gate is not None and cookie is None:
            return self._page("login.html", request, status=403, wrong=True)
        redirect = web.Response(status=303, headers={"Location": f"/{_link(request)}"})
        if cookie is not None:
            redirect.set_cookie(self._cookie, cookie, httponly=True, samesite="Strict")
        return redirect

    def _page(
        self, name: str, request: web.Request, status: int = 200, **values: Any
    ) -> web.Response:
        context = {"title": self.title, "link": _link(request), **values}
        page: web.Response = aiohttp_jinja2.render_template(name, request, context, status=status)
        return page

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Serves one tab; raises 503 if `max_tabs` are open, 400 for what is no request's id."""
        if self.num_tabs >= self.max_tabs:
            raise web.HTTPServiceUnavailable(text=f"{self.max_tabs} consoles are already open\n")
        tab, request_id = copy.copy(self), request.match_info.get("request_id")
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            raise web.HTTPBadRequest(text="/?request= takes the id of a request\n")
        if request_id is not None:
            tab.command = f"{self.command} {shlex.join(['--request', request_id])}"
        self.num_tabs += 1
        try:
            return await Server.handle_websocket(tab, request)
        finally:
            self.num_tabs -= 1


def _link(request: web.Request) -> str:
    """The part of the URL that names a request's page."""
    request_id = request.query.get("request", "")
    return f"?request={request_id}" if REQUEST_ID.fullmatch(request_id) else ""


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def run(
    command: Sequence[str], *, host: str, port: int, token: str | None, can_control: bool
) -> int:
    """Serves until interrupted; raises OSError if the port is taken, PageKeyError."""
    if token is not None:
        os.environ["VTOKEN_TOKEN"] = token
    file = KeyFile(port) if can_control and not has_terminal() else None
    try:
        gate = LoginGate(file.write if file else print_key) if can_control else None
        server = WebConsole(command, host=host, port=port, gate=gate)
        access = "can act" if can_control else "read-only"
        print(f"console at {server.public_url} ({access}); ctrl+c ends it", flush=True)
        if file is not None:
            print(f"page key, for one browser, in {file.path}", flush=True)
        server.serve()
    finally:
        if file is not None:
            file.close()
    return 0
