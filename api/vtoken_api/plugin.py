"""The entry point `vllm.endpoint_plugins`: mounts `/vtoken/v1` on vLLM's own server.

The plugin implements vLLM's contract (`name`, `required_tasks`, `attach_router`, `init_state`)
without importing vLLM. The routes are in a separate application behind the access check, so their
errors are problem documents and the rest of the server is unaffected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from argparse import Namespace
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from vtoken import wire
from vtoken.base.credentials import read_token_file, readable_by_others
from vtoken.base.errors import RefusedError
from vtoken_api import scrape
from vtoken_api.auth.access import Access
from vtoken_api.auth.check import AccessCheck, AccessControl
from vtoken_api.bus import engines_of, process_index
from vtoken_api.changes import Changes
from vtoken_api.ending import Ending
from vtoken_api.engine import Engine
from vtoken_api.fanout.hub import Hub
from vtoken_api.fleet import Fleet
from vtoken_api.forwarding import ForwardedCalls, Forwarder
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, fault, problem_response, refuse
from vtoken_api.rest import changes as rest_changes
from vtoken_api.rest import downloads, openapi, reads
from vtoken_api.rest.serving import served
from vtoken_api.service import Service
from vtoken_api.settings import ApiSettings, api_settings, shared_folder
from vtoken_api.state.journal import Journal
from vtoken_api.state.own_actions import OwnActions
from vtoken_api.state.recorder import Recorder
from vtoken_api.state.statedir import StateDir, default_path
from vtoken_api.stream import asyncapi
from vtoken_api.stream.endpoint import stream
from vtoken_api.text import RequestTexts

MOUNT_PATH = "/vtoken/v1"


class VTokenEndpointPlugin:
    """The REST routes and the stream of one server."""

    name = "vtoken"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.app = build_app()
        self._check = AccessCheck(self.app, self._access_control)
        self.listening: uvicorn.Server | None = None  # to other API processes
        self._forwarder: Forwarder | None = None
        self._service: Service | None = None
        self._running = contextlib.AsyncExitStack()  # what `close` stops

    def attach_router(self, app: FastAPI) -> None:
        """Mount the routes on vLLM's app, describe them in its OpenAPI document, add metrics."""
        app.router.routes.append(_Mount(MOUNT_PATH, self._answer))
        openapi.merge_into(app, MOUNT_PATH)
        scrape.attach(app, self.metrics)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect to the engines and start the service; `args` are vLLM's server arguments.

        Only API process 0 has a service. Raises ValueError if there are several processes and no
        folder that they share.
        """
        close_later = self._running.push_async_callback
        buses = engines_of(engine_client)
        settings = api_settings(args)
        access = _access(args, settings)
        shared = shared_folder(args)
        hubs = [Hub(bus) for bus in buses]
        ending = Ending(engine_client)
        if shared is not None and process_index(engine_client) > 0:
            self._forwarder = Forwarder(shared, access)
            for hub in hubs:
                hub.tell("server", ending.take)
                self._begin(hub.run())
            return
        state_dir = _state_dir(args, settings)
        self._running.callback(state_dir.close)
        journal = Journal(state_dir, [bus.rank for bus in buses])
        close_later(journal.close)
        fleet = Fleet(buses)
        changes = Changes(fleet, journal)
        service = Service(
            fleet=fleet,
            engines={hub.rank: Engine(hub, journal) for hub in hubs},
            auth=AccessControl(access, show_text=settings.show_text),
            model_name=_model_name(args),
            journal=journal,
            texts=RequestTexts(lambda: engine_client.get_tokenizer()),
            changes=changes,
        )
        for hub in hubs:
            hub.tell("server", ending.take)
            own_actions = OwnActions(hub, journal, partial(changes.follow, hub.rank))
            for part in (hub, Recorder(hub, journal), own_actions):
                self._begin(part.run())
        close_later(changes.close)
        self._service = self.app.state.service = state.vtoken = service
        if shared is not None:
            self.listening = await ForwardedCalls(self._answer_forwarded).listen(shared)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in the background until `close`."""
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._running.push_async_callback(end)

    async def close(self) -> None:
        """Stop the background tasks and release the state directory; clients stay connected.

        vLLM ends its process without this call.
        """
        await self._running.aclose()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._forwarder or self._check)(scope, receive, send)

    async def _answer_forwarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what another API process asks: a client's call, or vToken's metrics."""
        if scope["path"] == scrape.PATH:
            await Response(await self.metrics())(scope, receive, send)
        else:
            await self._check(scope, receive, send)

    async def metrics(self) -> bytes:
        """vToken's metrics; none before there is a service."""
        if self._forwarder is not None:
            with contextlib.suppress(ProblemError):  # process 0 does not answer
                return await self._forwarder.page(scrape.PATH)
        service = self._service
        return b"" if service is None else await scrape.exposed(service)

    def _access_control(self) -> AccessControl | None:
        return None if self._service is None else self._service.auth


class _Mount(Mount):
    """The mount of the routes, which answer with and without the server's `--root-path` in the
    path, as vLLM's own do: a proxy may have removed it. Below the mount it is always there.
    """

    def __init__(self, path: str, app: ASGIApp) -> None:
        super().__init__(path, app)
        # Without DOTALL, a path with a line break bypasses the check and reaches the host's routes.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.NONE:
            prefix = scope.get("root_path", "").rstrip("/")
            child["root_path"] = prefix + self.path
            if not scope["path"].startswith(child["root_path"]):
                child["path"] = prefix + scope["path"]
        return match, child


def _model_name(args: Namespace) -> str:
    served = args.served_model_name
    return str(served[0] if isinstance(served, list) and served else served or args.model)


def _access(args: Namespace, settings: ApiSettings) -> Access:
    """The access rules from arguments and token files; raises CredentialError, ValueError."""
    tokens: dict[str, str] = {}
    for name in ("read_token", "control_token"):
        if path := getattr(settings, f"{name}_file"):
            tokens[name] = read_token_file(path)
            if readable_by_others(path):
                logger.warning("vtoken: other users can read %s; run chmod 600 on it", path)
    access = Access.of_server(
        host=args.host,
        unix_socket=getattr(args, "uds", None) is not None,
        api_keys=args.api_key or [os.environ.get("VLLM_API_KEY", "")],
        **tokens,
    )
    if reason := access.server_read_only_reason:
        logger.warning(
            "vtoken: %s is read-only on %s: %s",
            MOUNT_PATH,
            args.host or "every interface",
            reason,
        )
    return access


def _state_dir(args: Namespace, settings: ApiSettings) -> StateDir:
    """The configured state directory, else the default."""
    named = settings.state_dir
    path = Path(named) if named else default_path(args.port, getattr(args, "uds", None))
    return StateDir(path)


def build_app() -> Starlette:
    """The application behind the access check; needs `state.service` before it is called."""
    handlers = {
        **reads.HANDLERS,
        **rest_changes.HANDLERS,
        **downloads.HANDLERS,
        **asyncapi.HANDLERS,
    }
    app = Starlette(
        routes=[*served(handlers), WebSocketRoute("/stream", stream)],
        exception_handlers=dict.fromkeys(
            (ProblemError, RefusedError, HTTPException, Exception), _on_error
        ),
    )
    app.router.redirect_slashes = False
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """A problem document, also of invalid queries and bodies and of unknown routes."""
    if isinstance(error, HTTPException):
        error = _unknown(request, error)
    elif isinstance(error, RefusedError):
        error = ProblemError(wire.Problem.of(error))
    return problem_response(error if isinstance(error, ProblemError) else fault())


def _unknown(request: Request, error: HTTPException) -> ProblemError:
    """The problem of an unknown route (404) or method (405)."""
    headers = dict(error.headers or {})
    if "Allow" in headers:
        detail = f"{request.url.path} accepts {headers['Allow']}, not {request.method}"
    else:
        detail = f"{request.url.path} does not exist, see /docs"
        if "/requests/" in request.url.path:
            detail += "; write %2F for a / within an id"
    return refuse(error.status_code, detail, headers=headers)
