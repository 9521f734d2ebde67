"""The REST routes that read: status, configuration, blocks, requests, events, audit.

Knows HTTP and the service. A route asks the engine, so that an answer is the state between two
steps, never a copy that has aged in this process.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from vtoken import commands, wire
from vtoken_api.problems import ProblemError
from vtoken_api.rest.inputs import check_query, parse_int, query_int
from vtoken_api.rest.openapi import answers, array_of, query, ref
from vtoken_api.service import Service

MAX_ID = 2**31 - 1
MAX_SEQ = 2**53 - 1
EVENTS_LIMIT = 1000
TOKENS_LIMIT = 4096
OCTETS = "application/octet-stream"

router = APIRouter(tags=["vToken"])


def service_of(request: Request) -> Service:
    """The service of the server that the request came to."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(service_of)]


def document(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A wire document as JSON."""
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def etag(revision: int) -> dict[str, str]:
    """The entity tag of a configuration revision."""
    return {"ETag": f'"{revision}"'}


@router.get(
    "/status",
    summary="Everything that matters now, in one document",
    operation_id="vtoken_status",
    responses=answers(ref(wire.Status), "The engine between two steps"),
)
async def get_status(request: Request, service: Served) -> Response:
    check_query(request)
    try:
        status = await service.bus.ask(commands.Status(), wire.Status)
    except ProblemError as error:
        age_s = service.hub.view_age_s
        if error.problem.status == HTTPStatus.SERVICE_UNAVAILABLE and age_s is not None:
            error.problem.detail += f"; its newest frame is {age_s:.0f} s old"
        raise
    service.complete(status)
    return document(status)


@router.get(
    "/config",
    summary="Desired and effective configuration, with the bound of every field",
    operation_id="vtoken_config",
    responses=answers(
        ref(wire.ConfigDocument),
        "The configuration",
        headers={"ETag": "the revision, for If-Match"},
    ),
)
async def get_config(request: Request, service: Served) -> Response:
    check_query(request)
    config = await service.bus.ask(commands.Config(), wire.ConfigDocument)
    return document(config, headers=etag(config.revision))


@router.get(
    "/policies",
    summary="Eviction policies, with the JSON schema of their parameters",
    operation_id="vtoken_policies",
    responses=answers(array_of(wire.PolicyInfo), "All policies"),
)
async def get_policies(request: Request, service: Served) -> Response:
    check_query(request)
    return document(await service.bus.ask(commands.Policies(), list[wire.PolicyInfo]))


@router.get(
    "/operations/{operation_id}",
    summary="How a compaction is going",
    operation_id="vtoken_operation",
    responses=answers(ref(wire.Operation), "The operation", 404),
)
async def get_operation(request: Request, operation_id: str, service: Served) -> Response:
    check_query(request)
    return document(await service.bus.ask(commands.Operation(id=operation_id), wire.Operation))


@router.get(
    "/blocks",
    summary="Live tokens, flags and owner of every block",
    operation_id="vtoken_blocks",
    description="With `Accept: application/octet-stream`: one byte a block, min(live, 255).",
    responses=answers(
        ref(wire.BlocksDocument),
        "The pool; the index in a list is the block's id",
        more_content={OCTETS: {"schema": {"type": "string", "format": "binary"}}},
    ),
)
async def get_blocks(request: Request, service: Served) -> Response:
    check_query(request)
    blocks = await service.bus.ask(commands.Blocks(), wire.BlocksDocument)
    live = wire.unpack_array(blocks.live, "<u2")
    if _prefers_octets(request.headers.get("accept", "")):
        octets = np.minimum(live, 255).astype(np.uint8).tobytes()
        return Response(octets, media_type=OCTETS, headers={"Vary": "Accept"})
    flags = wire.unpack_array(blocks.flags, "u1")
    owner = wire.unpack_array(blocks.owner, "<u2")
    blocks = msgspec.structs.replace(
        blocks, live=live.tolist(), flags=flags.tolist(), owner=owner.tolist()
    )
    return document(blocks, headers={"Vary": "Accept"})


@router.get(
    "/blocks/{block_id}",
    summary="One block, slot by slot",
    operation_id="vtoken_block",
    responses=answers(ref(wire.BlockDetail), "The block", 404),
)
async def get_block(request: Request, block_id: str, service: Served) -> Response:
    check_query(request)
    number = parse_int(block_id, "block_id", 0, MAX_ID)
    return document(await service.bus.ask(commands.Block(id=number), wire.BlockDetail))


@router.get(
    "/requests",
    summary="Every request that holds or waits for blocks",
    operation_id="vtoken_requests",
    responses=answers(
        array_of(wire.RequestRow), "All that hold blocks; of those that wait, the first 64"
    ),
)
async def get_requests(request: Request, service: Served) -> Response:
    check_query(request)
    return document(await service.bus.ask(commands.Requests(), list[wire.RequestRow]))


@router.get(
    "/requests/{request_id}",
    summary="One request and its block table",
    operation_id="vtoken_request",
    responses=answers(ref(wire.RequestDetail), "The request", 404),
)
async def get_request(request: Request, request_id: str, service: Served) -> Response:
    check_query(request)
    return document(await service.bus.ask(commands.Request(id=request_id), wire.RequestDetail))


@router.get(
    "/requests/{request_id}/tokens",
    summary="The token table of a request, by page",
    operation_id="vtoken_tokens",
    openapi_extra={
        "parameters": [
            query("start", {"type": "integer", "minimum": 0, "default": 0}, "first token id"),
            query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": TOKENS_LIMIT, "default": 256},
                "most rows",
            ),
        ]
    },
    responses=answers(ref(wire.TokenPage), "Rows in logical order", 404),
)
async def get_tokens(request: Request, request_id: str, service: Served) -> Response:
    check_query(request, ("start", "limit"))
    call = commands.Tokens(
        request_id=request_id,
        start=query_int(request, "start", 0, 0, MAX_ID),
        limit=query_int(request, "limit", 256, 1, TOKENS_LIMIT),
    )
    return document(await service.bus.ask(call, wire.TokenPage))


@router.get(
    "/events",
    summary="What happened, oldest first",
    operation_id="vtoken_events",
    openapi_extra={
        "parameters": [
            query("after", {"type": "integer", "minimum": 0, "default": 0}, "last seq seen"),
            query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": EVENTS_LIMIT, "default": 100},
                "most events",
            ),
        ]
    },
    responses=answers(ref(wire.EventPage), "Events after `after` that the engine still holds"),
)
async def get_events(request: Request, service: Served) -> Response:
    check_query(request, ("after", "limit"))
    call = commands.Events(
        after=query_int(request, "after", 0, 0, MAX_SEQ),
        limit=query_int(request, "limit", 100, 1, EVENTS_LIMIT),
    )
    return document(await service.bus.ask(call, wire.EventPage))


@router.get(
    "/audit",
    summary="Who changed or tried out what, newest last",
    operation_id="vtoken_audit",
    openapi_extra={
        "parameters": [
            query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": EVENTS_LIMIT, "default": 100},
                "most entries",
            )
        ]
    },
    responses=answers(ref(wire.AuditPage), "Accepted calls, and what the engine took back"),
)
async def get_audit(request: Request, service: Served) -> Response:
    check_query(request, ("limit",))
    return document(await service.audit.page(query_int(request, "limit", 100, 1, EVENTS_LIMIT)))


def _prefers_octets(accept: str) -> bool:
    """Whether `Accept` names octets, and not JSON before them."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return OCTETS in kinds and "application/json" not in kinds[: kinds.index(OCTETS)]
