"""Several API processes of one server: process 0 answers every call, the others forward theirs.

A call goes over a Unix socket in a folder that only the server's processes can open: as HTTP or as
a websocket, with its client's headers and one more, `FORWARDED`, that has the rest of its scope.
vLLM ends the server when an API process ends, so nothing takes the place of process 0.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from pathlib import Path

import httpx
import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from vtoken import wire
from vtoken_api.auth.access import Access
from vtoken_api.auth.check import SAFE_METHODS, deny, refuse_url_tokens
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.rest.inputs import read_bytes

SOCKET_NAME = "api"
FORWARDED = b"x-vtoken-forwarded"
ANSWER_S = 60.0  # the longest that process 0 takes to begin an answer
LOST = 1011  # the close code of a websocket whose process has ended
_OF_CONNECTION = frozenset(  # headers of the client's connection, not of its call
    {
        b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"te",
        b"transfer-encoding", b"upgrade", FORWARDED,
    }
)  # fmt: skip
_OF_ANSWERS = ("retry-after", "www-authenticate")  # headers of a refused websocket


class Forwarded(msgspec.Struct, frozen=True):
    """What the other process knows of a call, besides method, headers and body."""

    path: str
    raw_path: bytes = b""
    query_string: bytes = b""
    root_path: str = ""
    host: bytes = b""
    client: tuple[str, int] | None = None


class ForwardedCalls:
    """Gives `app` the calls that others forward, as if they had come to this process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def listen(self, folder: Path) -> uvicorn.Server:
        """Take calls at the socket in `folder`. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / SOCKET_NAME))
        config = uvicorn.Config(
            self,
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        return server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        carried = base64.b64decode(headers[FORWARDED])
        call = msgspec.msgpack.decode(carried, type=Forwarded)
        own = [pair for pair in scope["headers"] if pair[0] not in (b"host", FORWARDED)]
        scope.update(msgspec.structs.asdict(call), headers=[(b"host", call.host), *own])
        await self._app(scope, receive, send)


class Forwarder:
    """The application of `/vtoken/v1` in a process other than 0; `access` are the server's rules.

    A call gets 503 while process 0 does not listen.
    """

    def __init__(self, folder: Path, access: Access) -> None:
        self._socket = str(folder / SOCKET_NAME)
        self._access = access
        self._transport = httpx.AsyncHTTPTransport(
            uds=self._socket, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refuse_url_tokens(scope, self._access)  # before the server writes its access log
            if scope["type"] == "http":
                await self._pass_call(scope, receive, send)
            else:
                await self._pass_stream(scope, receive, send)
        except ProblemError as error:
            await deny(error, scope, receive, send)

    async def page(self, path: str) -> bytes:
        """What process 0 has at a path of its own; raises ProblemError 503."""
        answer = await self._ask("GET", [_carried(Forwarded(path))])
        try:
            return await answer.aread()
        finally:
            await answer.aclose()

    async def _pass_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        body = b"" if method in SAFE_METHODS else await read_bytes(Request(scope, receive))
        answer = await self._ask(method, _headers(scope), body)
        try:
            response = StreamingResponse(answer.aiter_raw(), answer.status_code)
            response.raw_headers = answer.headers.raw
            await response(scope, receive, send)
        finally:
            await answer.aclose()

    async def _ask(
        self, method: str, headers: list[tuple[bytes, bytes]], body: bytes = b""
    ) -> httpx.Response:
        limits = dict.fromkeys(("connect", "read", "write", "pool"), ANSWER_S)
        request = httpx.Request(
            method, "http://vtoken/", headers=headers, content=body, extensions={"timeout": limits}
        )
        try:
            return await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise _no_answer(error) from error

    async def _pass_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in _headers(scope) if not pair[0].startswith(b"sec-websocket-")]
        try:
            upstream = await unix_connect(
                self._socket,
                additional_headers=[(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers],
                user_agent_header=None,
                compression=None,
                proxy=None,
                ping_interval=None,
                max_size=None,
            )
        except InvalidStatus as refused:
            problem = msgspec.json.decode(refused.response.body or b"", type=wire.Problem)
            given = refused.response.headers
            raise ProblemError(problem, {n: given[n] for n in _OF_ANSWERS if n in given}) from None
        except (OSError, InvalidHandshake) as error:
            raise _no_answer(error) from error
        websocket = WebSocket(scope, receive, send)
        async with upstream:
            await websocket.accept()
            passing = [
                asyncio.create_task(_to_client(upstream, websocket)),
                asyncio.create_task(_from_client(websocket, upstream)),
            ]
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in passing:
                    task.cancel()
                await asyncio.gather(*passing, return_exceptions=True)


async def _to_client(upstream: ClientConnection, websocket: WebSocket) -> None:
    """Pass the stream on until it ends, and then how it ended."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client has left
        try:
            while True:
                message = await upstream.recv()
                if isinstance(message, str):
                    await websocket.send_text(message)
                else:
                    await websocket.send_bytes(message)
        except ConnectionClosed as end:
            code, reason = (LOST, "") if end.rcvd is None else (end.rcvd.code, end.rcvd.reason)
            await websocket.close(code, reason)


async def _from_client(websocket: WebSocket, upstream: ClientConnection) -> None:
    """Pass on what the client sends until it leaves."""
    with contextlib.suppress(ConnectionClosed):
        while (message := await websocket.receive())["type"] != "websocket.disconnect":
            text = message.get("text")
            await upstream.send(message["bytes"] if text is None else text)


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers of a forwarded call."""
    given = dict(scope["headers"])
    call = Forwarded(
        path=scope["path"],
        raw_path=scope.get("raw_path") or b"",
        query_string=scope["query_string"],
        root_path=scope.get("root_path", ""),
        host=given.get(b"host", b""),
        client=scope.get("client"),
    )
    return [
        *((name, value) for name, value in scope["headers"] if name not in _OF_CONNECTION),
        _carried(call),
    ]


def _carried(call: Forwarded) -> tuple[bytes, bytes]:
    return FORWARDED, base64.b64encode(msgspec.msgpack.encode(call))


def _no_answer(error: Exception) -> ProblemError:
    silent = f"API process 0, which answers for all, does not answer: {error or 'it is silent'}"
    return refuse(503, silent, title="No answer", headers={"Retry-After": "1"})
