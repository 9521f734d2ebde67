"""The websocket `/vtoken/v1/stream`: admits and authenticates clients and ends their streams.

A refused client gets an HTTP problem document before the handshake, or close code
4000 + HTTP status after it. Code 1008: the client reads too slowly. 1011: an internal error.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

import msgspec
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from vtoken.base.documents import Decoder, MalformedError
from vtoken.wire import routes
from vtoken_api.auth.access import Access, Grant, unauthorized
from vtoken_api.auth.check import CLOSE_CODE_BASE, GRANT, AccessControl, deny
from vtoken_api.fanout.cursor import TOPICS
from vtoken_api.fanout.subscriber import StreamQuery, Subscriber
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.rest.inputs import read_query
from vtoken_api.service import Service

MAX_CLIENTS = 64  # of one engine
MAX_UNAUTHENTICATED = 32  # connections whose client has not sent its token, apart from MAX_CLIENTS
AUTH_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
MAX_AUTH_CHARS = 4096
MAX_CLIENT_MESSAGES = 16
_RESUME = re.compile(r"([\w.-]{1,64}):([0-9]{1,18})")


class AuthMessage(msgspec.Struct, tag_field="type", tag="auth"):
    """The first message of a client that cannot set headers."""

    token: str


_auth_messages: Decoder[AuthMessage] = Decoder(AuthMessage)


async def stream(websocket: WebSocket) -> None:
    """Serve one client until it leaves, is too slow, or the engine stops."""
    service: Service = websocket.app.state.service
    try:
        query = parse_query(websocket)
        grant: Grant | None = websocket.scope[GRANT]
        if grant is None:
            grant = await _authenticated(websocket, service.auth)
        await _serve(websocket, service, query, grant)
    except ProblemError as error:
        await _refuse(websocket, error)
    except TimeoutError:
        await _close(websocket, 1008, "the client reads too slowly")
    except WebSocketDisconnect:
        pass
    except Exception:
        logger.exception("vtoken: a stream failed")
        await _close(websocket, 1011, "internal server error; see the server's log")


async def _serve(websocket: WebSocket, service: Service, query: StreamQuery, grant: Grant) -> None:
    async def send(data: bytes) -> None:
        try:
            if query.packed:
                await websocket.send_bytes(data)
            else:
                await websocket.send_text(data.decode())
        except RuntimeError as error:  # the server closed it after a protocol error of the client
            raise WebSocketDisconnect(1006) from error

    first = service.fleet.ranks[0]
    hub = service.engine(first if query.engine is None else query.engine).hub
    if hub.num_clients >= MAX_CLIENTS:
        raise refuse(429, "too many clients", bound=f"{MAX_CLIENTS} clients")
    subscriber = Subscriber(hub, query, send)
    hub.join(subscriber)  # without an await since the check
    try:
        await subscriber.prepare()
        if websocket.application_state is WebSocketState.CONNECTING:
            await websocket.accept()
        sender = asyncio.create_task(
            subscriber.run(
                read_only_reason=grant.read_only_reason,
                can_read_text=service.auth.can_read_text(grant),
                engines=service.fleet.ranks,
            )
        )
        receiver = asyncio.create_task(_until_disconnect(websocket))
        try:
            await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            receiver.cancel()
            outcomes = await asyncio.gather(sender, receiver, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
    finally:
        hub.leave(subscriber)


def parse_query(connection: HTTPConnection) -> StreamQuery:
    """The stream's query; raises 422."""
    query = read_query(connection, routes.StreamQuery)
    topics = frozenset(query.topics.split(","))
    if not topics <= set(TOPICS):
        unknown = ", ".join(sorted(topics - set(TOPICS)))
        raise refuse(422, "unknown topic", field="topics", value=unknown, bound=", ".join(TOPICS))
    resume = None if query.resume is None else _RESUME.fullmatch(query.resume)
    if query.resume is not None and resume is None:
        raise refuse(
            422,
            "malformed resume position",
            field="resume",
            value=query.resume,
            bound="EPOCH:SEQ, with the SEQ of the last event seen (0: none)",
        )
    return StreamQuery(
        topics=topics,
        fps=query.fps,
        packed=query.format == "msgpack",
        resume=None if resume is None else (resume[1], int(resume[2])),
        engine=query.engine,
    )


async def _authenticated(websocket: WebSocket, control: AccessControl) -> Grant:
    """Accept the connection and wait for its token. Raises 429 if too many others wait, and 401."""
    if control.num_unauthenticated >= MAX_UNAUTHENTICATED:
        raise refuse(
            429,
            f"{control.num_unauthenticated} clients have not sent their token yet",
            bound=f"{MAX_UNAUTHENTICATED} connections without a token in the header",
            headers={"Retry-After": "1"},
        )
    control.num_unauthenticated += 1
    try:
        await websocket.accept()
        return await _first_message(websocket, control.access)
    finally:
        control.num_unauthenticated -= 1


async def _first_message(websocket: WebSocket, access: Access) -> Grant:
    """Raises 401 unless the client sends {"type": "auth", "token": TOKEN} in time."""
    try:
        async with asyncio.timeout(AUTH_TIMEOUT_S):
            message = await websocket.receive()
    except TimeoutError as error:
        raise unauthorized("this server needs a token") from error
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1005))
    text = message.get("text") or ""
    if len(text) > MAX_AUTH_CHARS:
        raise unauthorized("the first message is too long")
    try:
        return access.grant_token(_auth_messages.decode(text).token)
    except (MalformedError, UnicodeEncodeError) as error:
        raise unauthorized("the first message holds no token") from error


async def _until_disconnect(websocket: WebSocket) -> None:
    """Wait for the client to disconnect; raises 400 after MAX_CLIENT_MESSAGES messages.

    Messages after authentication are ignored.
    """
    num_messages = 0
    while (await websocket.receive())["type"] != "websocket.disconnect":
        num_messages += 1
        if num_messages > MAX_CLIENT_MESSAGES:
            raise refuse(400, "the stream accepts no messages", bound=f"{MAX_CLIENT_MESSAGES}")


async def _refuse(websocket: WebSocket, error: ProblemError) -> None:
    if websocket.application_state is not WebSocketState.CONNECTING:
        await _close(websocket, CLOSE_CODE_BASE + error.problem.status, error.problem.detail)
    else:
        await deny(error, websocket.scope, websocket.receive, websocket.send)


async def _close(websocket: WebSocket, code: int, reason: str) -> None:
    """Close the websocket, without waiting longer than CLOSE_TIMEOUT_S."""
    with contextlib.suppress(TimeoutError, RuntimeError, WebSocketDisconnect):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await websocket.close(code, reason.encode()[:120].decode(errors="ignore"))
