"""The access check of `/vtoken/v1`: an ASGI application before routing, which handles errors too.

The check wraps the entire mounted application, so no route, known or unknown, is reachable without
it. A token in a URL is refused and removed from the scope before the server writes its access log.

The check lets readers call the routes of DRY_RUNS, because the dry-run flag may be in the body.
Such a route calls `permit` first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vtoken.wire.routes import ROUTES
from vtoken_api.auth.access import Access, Grant, address_of
from vtoken_api.auth.refusals import REFUSED, Refusals
from vtoken_api.bus import BILL
from vtoken_api.limits import (
    CONTROLLERS,
    COSTS,
    DRY_RUN_COST,
    DRY_RUN_TIME,
    READ_TIME,
    READERS,
    EngineTime,
    RateLimits,
)
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, fault, problem_response, refuse

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Paths of routes that have dry runs; a name in a path may contain a slash.
DRY_RUNS = re.compile(
    "|".join(re.sub(r"\{\w+\}", ".+", r.path.strip("/")) for r in ROUTES if r.dry_run)
)
SECRET_NAMES = frozenset(
    {"token", "access_token", "auth_token", "api_key", "apikey", "key", "authorization", "bearer"}
)
CLOSE_CODE_BASE = 4000  # a refused websocket closes with 4000 + HTTP status
DENIAL_EXTENSION = "websocket.http.response"
TOKEN_HEADER = "X-VToken-Token"  # of an answer: `ignored`, since the server has no tokens
GRANT = "vtoken.grant"  # scope key: the caller's Grant; None until a websocket sends its token


@dataclass(slots=True)
class AccessControl:
    """Access rules, rate limits and the count of refused calls.

    `show_text`: whether the server shows the text of requests.
    """

    access: Access
    show_text: bool = False
    limits: RateLimits = field(default_factory=RateLimits)
    refusals: Refusals = field(default_factory=Refusals)
    num_unauthenticated: int = 0  # open streams whose client has not sent its token

    def check_text(self, grant: Grant) -> None:
        """Raises 403 for a caller who may not read the text of requests."""
        if not self.show_text:
            raise refuse(
                403,
                "this server does not show the text of requests",
                title="Text is not shown",
                bound="a server started with --vtoken-show-text",
            )
        if not grant.can_control:
            raise refuse(
                403,
                f"reading text needs control: {grant.read_only_reason}",
                title="Read-only",
                bound="the token of --vtoken-control-token-file",
            )

    def can_read_text(self, grant: Grant) -> bool:
        """Whether `check_text` would pass."""
        return self.show_text and grant.can_control


class AccessCheck:
    """Forwards a call to `app` if `control()` allows it; None means the engine is not ready."""

    def __init__(self, app: ASGIApp, control: Callable[[], AccessControl | None]) -> None:
        self._app = app
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        started = False
        control = self._control()
        BILL.set(None)

        async def tracked_send(message: Message) -> None:
            nonlocal started
            grant: Grant | None = scope.get(GRANT)
            if not started and grant is not None and grant.token_ignored:
                message.setdefault("headers", [])
                MutableHeaders(scope=message).append(TOKEN_HEADER, "ignored")
            started = True
            status = _status(message)
            if control is not None and status in REFUSED:
                control.refusals.note(scope, status)
            await send(message)

        try:
            _admit(scope, control)
            await self._app(scope, receive, tracked_send)
        except ProblemError as error:
            await deny(error, scope, receive, tracked_send)
        except Exception:
            logger.exception("vtoken: %s failed", scope["path"])
            if not started:
                await deny(fault(), scope, receive, tracked_send)


def _status(message: Message) -> int:
    """The HTTP status that begins an answer, or that a websocket is closed with; else 0."""
    if message["type"] == "websocket.close":
        return int(message["code"]) - CLOSE_CODE_BASE
    return int(message.get("status", 0))


def _admit(scope: Scope, control: AccessControl | None) -> None:
    """Raises 401, 403, 429 or 503; puts the caller's grant into the scope."""
    refuse_url_tokens(scope, None if control is None else control.access)
    if control is None:
        raise refuse(503, "the engine is not ready yet", headers={"Retry-After": "1"})
    headers = Headers(scope=scope)
    control.access.check_browser(headers)
    http = scope["type"] == "http"
    route = scope["path"].removeprefix(scope.get("root_path", "")).strip("/")
    changes = http and scope["method"] not in SAFE_METHODS and not DRY_RUNS.fullmatch(route)
    kind = "change" if changes else "read" if http else "stream"
    cost = COSTS.get(route.split("/")[0], 1.0)
    control.limits.spend(address_of(scope.get("client")), kind, cost)
    # A websocket may send its token as the first message, because browsers cannot set headers.
    grant: Grant | None = None
    if http or "authorization" in headers or not control.access.needs_token:
        grant = control.access.grant(headers.get("authorization"))
    if grant is not None and changes:
        grant.check_control()
    scope[GRANT] = grant
    if grant is not None and http and scope["method"] in SAFE_METHODS:
        BILL.set(_bill(grant, control, READ_TIME))


def permit(scope: Scope, control: AccessControl, *, dry_run: bool) -> None:
    """Check a call to a route of DRY_RUNS; raises 403 (a reader's change) or 429."""
    address, grant = address_of(scope.get("client")), scope[GRANT]
    if dry_run:
        control.limits.spend(address, "read", DRY_RUN_COST)
        BILL.set(_bill(grant, control, DRY_RUN_TIME))
    else:
        grant.check_control()
        control.limits.spend(address, "change")


def _bill(grant: Grant, control: AccessControl, kind: str) -> EngineTime:
    return EngineTime(control.limits, CONTROLLERS if grant.can_control else READERS, kind)


def refuse_url_tokens(scope: Scope, access: Access | None) -> None:
    """Raises 401 for a token in the URL: logs, histories and proxies would store it."""
    query = scope.get("query_string", b"")
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        known = access is not None and (access.is_token(name) or access.is_token(value))
        if known or name.lower() in SECRET_NAMES:
            scope["query_string"] = b"refused"
            raise refuse(
                401,
                "a token in the URL is refused; replace it, because proxies may have logged it",
                field="the query of the URL",
                bound="Authorization: Bearer TOKEN, or the first message of the stream",
                headers={"WWW-Authenticate": "Bearer"},
            )


async def deny(error: ProblemError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the problem document, also to a websocket that is not accepted yet."""
    if scope["type"] == "http" or DENIAL_EXTENSION in scope.get("extensions", {}):
        await problem_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.accept"})
        code = CLOSE_CODE_BASE + error.problem.status
        reason = error.problem.detail.encode()[:120].decode(errors="ignore")
        await send({"type": "websocket.close", "code": code, "reason": reason})
