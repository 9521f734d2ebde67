"""`GET /metrics`: vLLM's page followed by vToken's metrics.

vLLM's plugin contract lets a plugin's route replace an earlier one of the same path. The new route
calls the replaced one and appends to its response. A scrape waits for the engine at most SCRAPE_S.
Without an answer, `vllm:vtoken_up` is 0 and the engine's other metrics are absent, so that no stale
value looks current.
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
    """Add vToken's metrics to the `/metrics` of `app`."""
    vllm_endpoint = _endpoint(app)

    @app.get(
        PATH,
        summary="Prometheus metrics of vLLM and vToken",
        response_class=Response,
        include_in_schema=vllm_endpoint is not None,
    )
    async def metrics(request: Request) -> Response:
        response = Response(b"", media_type=CONTENT_TYPE_LATEST)
        if vllm_endpoint is not None:
            response = await _call(vllm_endpoint, request)
        running = service()
        if running is None or "content-encoding" in response.headers:
            return response
        text = exposition(await snapshot(running), running.model_name)
        return Response(bytes(response.body) + text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def snapshot(service: Service) -> Snapshot:
    """The values of the engine and this process; without an answer in time, of this process
    alone."""
    status: wire.Status | None = None
    config: wire.ConfigDocument | None = None
    with contextlib.suppress(ProblemError, TimeoutError):
        async with asyncio.timeout(SCRAPE_S):
            view = await service.hub.current()  # queries the engine once a second at most
            if service.hub.alive:
                status, config = view.status, view.config
    return Snapshot(
        status=status,
        config=config,
        clients=service.hub.num_clients,
        dropped_events=service.hub.num_dropped,
        refused=service.auth.refusals.counts,
        audit_failing=bool(service.journal.audit.error),
        recorder_faults=service.recorder.num_faults,
        recording=service.recorder.recording,
    )


def _endpoint(app: FastAPI) -> Callable[..., Any] | None:
    """The endpoint that handles `GET /metrics` so far."""
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
