"""`GET /metrics`: vLLM's own page, with vToken's metrics behind it.

Knows FastAPI, and vLLM's route by its path only. vLLM's plugin contract lets a plugin's route stand
in for an earlier one of the same path; the one that stood there is called first, and its answer is
sent on as it is. A scrape waits for the engine SCRAPE_S at most; without an answer
`vllm:vtoken_up` is 0 and the rest of the engine's metrics are absent, so that no stale value looks
alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from vtoken import wire
from vtoken_api.metrics import Snapshot, exposition
from vtoken_api.problems import ProblemError
from vtoken_api.service import Service

PATH = "/metrics"
SCRAPE_S = 1.0


def attach(app: FastAPI, service: Callable[[], Service | None]) -> None:
    """Put vToken's metrics on the `/metrics` of `app`."""
    before = _endpoint(app)

    @app.get(
        PATH,
        summary="Prometheus metrics of vLLM and vToken",
        response_class=Response,
        include_in_schema=before is not None,
    )
    async def metrics(request: Request) -> Response:
        shown = Response(b"", media_type=CONTENT_TYPE_LATEST)
        if before is not None:
            shown = await _call(before, request)
        own = service()
        if own is None or "content-encoding" in shown.headers:
            return shown
        text = exposition(await snapshot(own), own.model_name)
        return Response(bytes(shown.body) + text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def snapshot(service: Service) -> Snapshot:
    """What the engine and this process say now; without an answer in time, this process alone."""
    status: wire.Status | None = None
    config: wire.ConfigDocument | None = None
    with contextlib.suppress(ProblemError, TimeoutError):
        async with asyncio.timeout(SCRAPE_S):
            view = await service.hub.current()  # the engine is asked once a second at most
            if service.hub.alive:
                status, config = view.status, view.config
    return Snapshot(
        status=status,
        config=config,
        clients=service.hub.num_clients,
        dropped_events=service.hub.num_dropped,
        refused=service.auth.refusals.counts,
        audit_failing=bool(service.audit.error),
        recorder_faults=service.flight.num_faults,
        recording=service.flight.recording,
        process=service.process,
    )


def _endpoint(app: FastAPI) -> Callable[..., Any] | None:
    """What answers `GET /metrics` so far."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path == PATH and "GET" in route.methods:
            return route.endpoint
    return None


async def _call(endpoint: Callable[..., Any], request: Request) -> Response:
    if inspect.iscoroutinefunction(endpoint):
        answer = await endpoint(request)
    else:
        answer = await run_in_threadpool(endpoint, request)
    assert isinstance(answer, Response)
    return answer
