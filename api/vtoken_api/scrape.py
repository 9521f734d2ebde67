"""`GET /metrics`: vLLM's page followed by vToken's metrics.

vLLM's plugin contract lets a plugin's route replace an earlier one of the same path. The new route
calls the replaced one and appends to its response. A scrape waits for the engines at most SCRAPE_S.
An engine in a longer step answers later: its newest known values are shown, with their age. Once it
is dead, its `vllm:vtoken_up` is 0 and its other metrics are absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from vtoken_api.engine import Engine
from vtoken_api.metrics import Snapshot, exposition
from vtoken_api.problems import ProblemError
from vtoken_api.service import Service

PATH = "/metrics"
SCRAPE_S = 1.0


def attach(app: FastAPI, page: Callable[[], Awaitable[bytes]]) -> None:
    """Add vToken's metrics, which `page` returns, to the `/metrics` of `app`."""
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
        if "content-encoding" in response.headers:
            return response
        text = await page()
        return Response(bytes(response.body) + text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def exposed(service: Service) -> bytes:
    """vToken's metrics. Those of the server as a whole are with the first engine's."""
    first, *others = await asyncio.gather(*map(snapshot, service.engines.values()))
    failing = bool(service.journal.audit.error)
    first = replace(first, refused=service.auth.refusals.counts, audit_failing=failing)
    return exposition([first, *others], service.model_name)


async def snapshot(engine: Engine) -> Snapshot:
    """The newest values of an engine, and those of the API about it."""
    hub = engine.hub
    with contextlib.suppress(ProblemError, TimeoutError):
        async with asyncio.timeout(SCRAPE_S):
            await hub.current()  # queries the engine once a second at most
    state = hub.state if hub.alive else None
    return Snapshot(
        engine=engine.rank,
        status=None if state is None else state.status,
        config=None if state is None else state.config,
        alive=hub.alive,
        age_s=hub.state_age_s,
        clients=hub.num_clients,
        dropped_events=hub.num_dropped,
        recorder_faults=engine.flight.num_faults,
        recording=engine.flight.recording,
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
