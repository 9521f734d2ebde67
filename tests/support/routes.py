"""Calls with tokens, and access checks of every route of the API.

The routes are those of the mounted application, so an unguarded route fails.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import websockets
from fastapi import FastAPI
from starlette.routing import Route, WebSocketRoute
from websockets.asyncio.client import ClientConnection

from tests.support.waiting import LIMIT_S
from vtoken_api.plugin import MOUNT_PATH, VTokenEndpointPlugin, build_app

READ, CONTROL = "the-read-token-0123", "the-control-token-0123"


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def every_route() -> list[tuple[str, str]]:
    """(method, path) of every route of the mounted application; method WS: a websocket."""
    found = []
    for route in build_app().routes:
        if isinstance(route, WebSocketRoute):
            found.append(("WS", route.path))
        else:
            assert isinstance(route, Route), f"a kind of route without an access check: {route!r}"
            found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


def openapi_document() -> dict[str, Any]:
    """What the plugin describes on a host application."""
    app = FastAPI()
    VTokenEndpointPlugin().attach_router(app)
    return app.openapi()


async def check_every_route(http: httpx.AsyncClient, read_token: str) -> int:
    """Every route answers 401 without a token and with a wrong one, and 403 to a reader's change.

    Returns the number of routes.
    """
    root = str(http.base_url).rstrip("/") + MOUNT_PATH
    routes = every_route()
    for method, template in routes:
        path = template.replace("{", "").replace("}", "")
        for headers in (bearer(None), bearer("wrong-token-0123"), {"Authorization": "Basic eDp5"}):
            if method == "WS":
                url = root.replace("http://", "ws://") + path
                assert await stream_status(url, headers) == 401, path
            else:
                answer = await http.request(method, root + path, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert method == "HEAD" or answer.json()["status"] == 401
        if method not in ("WS", "GET", "HEAD"):
            answer = await http.request(method, root + path, headers=bearer(read_token))
            assert answer.status_code == 403, (method, path)
            assert answer.json()["title"] == "Read-only"
    return len(routes)


async def stream_status(url: str, headers: dict[str, str]) -> int:
    """The HTTP status, or that of the close code, that refuses a websocket; 0: it was accepted."""
    try:
        async with websockets.connect(url, additional_headers=headers) as stream:
            await stream.send("let me in")
            await asyncio.wait_for(stream.recv(), LIMIT_S)
    except websockets.InvalidStatus as refused:
        return refused.response.status_code
    except websockets.ConnectionClosedError as refused:
        return (refused.rcvd.code if refused.rcvd else 0) - 4000
    return 0


def token_file(folder: Path, name: str, token: str) -> str:
    path = folder / name
    path.write_text(token + "\n")
    path.chmod(0o600)
    return str(path)


def token_files(folder: Path, *, read: bool, control: bool) -> dict[str, str]:
    files = {}
    if read:
        files["read_token_file"] = token_file(folder, "read", READ)
    if control:
        files["control_token_file"] = token_file(folder, "control", CONTROL)
    return files


async def hello_of(url: str, token: str | None, *, first_message: bool = False) -> Any:
    """The first message of a stream; the token travels as header or as first message."""
    headers = {} if first_message else bearer(token)
    async with websockets.connect(url, additional_headers=headers) as stream:
        if first_message:
            await stream.send(f'{{"type": "auth", "token": "{token}"}}')
        return json.loads(await asyncio.wait_for(stream.recv(), LIMIT_S))


async def told_that_the_engine_ended(stream: ClientConnection) -> None:
    """Wait until vToken closes the stream, or its server shuts down."""
    await asyncio.wait_for(stream.wait_closed(), LIMIT_S)
    assert stream.close_code in (4503, 1012)
