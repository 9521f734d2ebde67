"""The door of `/vtoken/v1`: checks access before any route is looked at, and answers what escapes.

Knows ASGI, the access rules and the problem documents. It stands in front of the whole mounted
application, so that no route, known or not, can be reached without passing it.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vtoken_api.access import Access
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, problem_response, refuse

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CLOSE_CODE_BASE = 4000  # a refused websocket closes with 4000 + HTTP status
DENIAL_EXTENSION = "websocket.http.response"


class Guard:
    """Passes a call on to `app` once `access()` allows it."""

    def __init__(self, app: ASGIApp, access: Callable[[], Access | None]) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, tracked_send)
        except ProblemError as error:
            await deny(error, scope, receive, send)
        except Exception:
            logger.exception("vtoken: %s failed", scope["path"])
            if not started:
                fault = refuse(500, "a fault in the server, see its log")
                await deny(fault, scope, receive, send)

    def _check(self, scope: Scope) -> None:
        access = self._access()
        if access is None:
            raise refuse(503, "the engine is not ready yet", headers={"Retry-After": "1"})
        headers = Headers(scope=scope)
        access.check_browser(headers)
        # A websocket may send its token as the first message: browsers cannot set headers.
        if scope["type"] == "http" or "authorization" in headers:
            access.check_token(headers)
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
            access.check_control()


async def deny(error: ProblemError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the problem: over HTTP, also for a websocket that has not been accepted."""
    response = problem_response(error)
    if scope["type"] == "http":
        await response(scope, receive, send)
    elif DENIAL_EXTENSION in scope.get("extensions", {}):
        await _deny_websocket(response, send)
    else:
        await send({"type": "websocket.accept"})
        code = CLOSE_CODE_BASE + error.problem.status
        reason = error.problem.detail.encode()[:120].decode(errors="ignore")
        await send({"type": "websocket.close", "code": code, "reason": reason})


async def _deny_websocket(response: Response, send: Send) -> None:
    await send(
        {
            "type": "websocket.http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )
    await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
