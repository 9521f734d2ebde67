"""How a row of `vtoken.wire.routes` is served: what is read before its handler runs, and answered.

A handler gets a call whose query and body are valid and which its caller may make. It returns the
document to answer, or a response. A row with a command and without a handler asks the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import Scope

from vtoken import wire
from vtoken.wire.routes import JSON, ROUTES, OneEngine, Query, Route
from vtoken_api.auth.access import Grant, actor_of
from vtoken_api.auth.check import GRANT, permit
from vtoken_api.changes import Caller
from vtoken_api.rest.inputs import change_id, if_match, plain, read_body, read_model, read_query
from vtoken_api.service import Service


@dataclass(slots=True)
class Asked:
    """A call: its row, and what it was made with. `body`: as the row says."""

    route: Route[Any]
    request: Request
    service: Service
    query: Query
    body: Any = None

    @property
    def names(self) -> dict[str, str]:
        """The values in the path."""
        return self.request.path_params

    @property
    def if_match(self) -> int | None:
        """The revision that the call is made for; raises 400."""
        return if_match(self.request)

    def caller(self) -> Caller:
        """The caller's name and rights, and the id of its change; raises 400."""
        request = self.request
        grant: Grant = request.scope[GRANT]
        name = actor_of(request.headers, request.client)
        return Caller(name, grant.can_control, change_id(request))


Handler = Callable[[Asked, Any], Awaitable[Any]]  # is given the query too
Handlers = Mapping[Route[Any], Handler]


async def ask(asked: Asked, query: Any) -> Any:
    """The answer to the row's command, of the engine that is named or that knows it."""
    route, fleet = asked.route, asked.service.fleet
    assert route.command is not None
    given = structs.asdict(query) | {name: plain(text) for name, text in asked.names.items()}
    rank = given.pop("engine")
    call: Any
    if isinstance(query, OneEngine):
        call = read_model(given, route.command)
        return await fleet.one(rank).ask(call, route.answer)
    if "request_id" in given:
        engine, request_id = await fleet.holder(
            rank, asked.names["request_id"], running=route.running
        )
        call = read_model(given | {"request_id": request_id}, route.command)
        return await engine.ask(call, route.answer)
    call = read_model(given, route.command)
    _, answer = await fleet.find(rank, call, route.answer)
    return answer


def document(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A wire document as JSON; the revision of a configuration is its entity tag."""
    headers = dict(headers or {})
    if isinstance(value, wire.ConfigDocument | wire.PatchResult):
        headers["ETag"] = f'"{value.revision}"'
    return Response(msgspec.json.encode(value), status, headers, JSON)


def served(handlers: Handlers) -> list[ServedRoute]:
    """Every row as a route of the application."""
    return [ServedRoute(row, handlers.get(row, ask)) for row in ROUTES]


class ServedRoute(StarletteRoute):
    """Matches the path as the client wrote it, so that an id may contain a slash, quoted as `%2F`,
    and unquotes its parameters.
    """

    def __init__(self, row: Route[Any], handler: Handler) -> None:
        self._row, self._handler = row, handler
        self._changes, self._dry_run = row.changes, row.dry_run
        self._says_in_query = row.dry_run in row.query.__struct_fields__  # whether it is a dry run
        super().__init__(row.path, self._answered, methods=[row.method], name=row.name)
        self.methods = {row.method}  # without HEAD

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, matched = super().matches({**scope, "path": _raw_path(scope)})
        if match != Match.NONE:
            params = matched["path_params"]
            matched["path_params"] = {name: unquote(value) for name, value in params.items()}
        return match, matched

    async def _answered(self, request: Request) -> Response:
        """The answer of the handler; raises ProblemError, RefusedError.

        A caller without control is refused before the body is read, unless the body says whether
        the call is a dry run.
        """
        row, service = self._row, request.app.state.service
        asked = Asked(row, request, service, read_query(request, row.query))
        if self._dry_run and self._says_in_query:
            permit(request.scope, service.auth, dry_run=getattr(asked.query, self._dry_run))
        if self._changes:
            asked.body = await read_body(request, row)
            if self._dry_run and not self._says_in_query:
                permit(request.scope, service.auth, dry_run=getattr(asked.body, self._dry_run))
        answer = await self._handler(asked, asked.query)
        return answer if isinstance(answer, Response) else document(answer, row.status)


def _raw_path(scope: Scope) -> str:
    """The scope's path, quoted below `root_path`."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"].removeprefix(root)
    raw: str = (scope.get("raw_path") or b"").decode("latin-1")
    at = raw.find("/")
    while at >= 0 and unquote(raw[at:]) != path:
        at = raw.find("/", at + 1)
    return root + (raw[at:] if at >= 0 else quote(path))
