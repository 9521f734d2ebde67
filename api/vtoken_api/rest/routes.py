"""The REST routes that read: engines, status, configuration, blocks, requests, events, audit.

Every route but `/audit` queries an engine, so that an answer is the state between two steps and
never a stale copy. What has an id is looked for in all engines.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from vtoken import wire
from vtoken.wire import commands
from vtoken.wire.request_names import MIN_RANDOM
from vtoken_api.auth.check import permit_text
from vtoken_api.problems import ProblemError
from vtoken_api.rest.inputs import (
    CHANGE_HEADER,
    AuditQuery,
    BlockPath,
    EventsQuery,
    FindQuery,
    NoQuery,
    ReadQuery,
    TokensQuery,
    plain,
    query,
    read_model,
)
from vtoken_api.rest.openapi import answers, array_of, parameters, ref
from vtoken_api.rest.raw_route import RawRoute
from vtoken_api.service import Service

OCTETS = "application/octet-stream"
REQUEST_ID = (
    "`request_id`, in which `/` is written `%2F`: the engine's id, the id of the answer, the "
    f"client's `X-Request-Id`, or one of these cut behind at least {MIN_RANDOM} random digits."
)

router = APIRouter(tags=["vToken"], route_class=RawRoute)


def service_of(request: Request) -> Service:
    """The service of the request's server."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(service_of)]
Read = Annotated[ReadQuery, Depends(query(ReadQuery))]
Find = Annotated[FindQuery, Depends(query(FindQuery))]


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
    "/engines",
    summary="Every engine of this server, and whether they agree",
    operation_id="vtoken_engines",
    responses=answers(ref(wire.Fleet), "All engines, also those that do not answer"),
    dependencies=[Depends(query(NoQuery))],
)
async def get_engines(service: Served) -> Response:
    return document(await service.fleet.document())


@router.get(
    "/status",
    summary="The state of the KV cache in one document",
    operation_id="vtoken_status",
    responses=answers(ref(wire.Status), "The engine between two steps"),
    openapi_extra=parameters(ReadQuery),
)
async def get_status(service: Served, at: Read) -> Response:
    engine = service.fleet.one(at.engine)
    try:
        status = await engine.bus.ask(commands.Status(), wire.Status)
    except ProblemError as error:
        age_s = engine.hub.view_age_s
        if error.problem.status == HTTPStatus.SERVICE_UNAVAILABLE and age_s is not None:
            error.problem.detail += f"; its newest frame is {age_s:.0f} s old"
        raise
    engine.complete(status)
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
    openapi_extra=parameters(ReadQuery),
)
async def get_config(service: Served, at: Read) -> Response:
    engine = service.fleet.one(at.engine)
    config = await engine.bus.ask(commands.Config(), wire.ConfigDocument)
    return document(config, headers=etag(config.revision))


@router.get(
    "/policies",
    summary="Eviction policies, with the JSON schema of their parameters",
    operation_id="vtoken_policies",
    responses=answers(array_of(wire.PolicyInfo), "All policies"),
    openapi_extra=parameters(FindQuery),
)
async def get_policies(service: Served, at: Find) -> Response:
    _, policies = await service.fleet.find(at.engine, commands.Policies(), list[wire.PolicyInfo])
    return document(policies)


@router.get(
    "/operations/{operation_id}",
    summary="The state of a compaction",
    operation_id="vtoken_operation",
    responses=answers(ref(wire.Operation), "The operation", 404),
    openapi_extra=parameters(FindQuery),
)
async def get_operation(operation_id: str, service: Served, at: Find) -> Response:
    return document(await service.fleet.operation(at.engine, operation_id))


@router.get(
    "/changes/{change_id}",
    summary="What became of a change whose answer was lost",
    operation_id="vtoken_change",
    description="`change_id` is the one that the problem names, or that the caller sent in the "
    f"header `{CHANGE_HEADER}`. `not_applied`: the engine handled no change of this id and refuses "
    "one that comes later.",
    responses=answers(ref(wire.Change), "The change"),
    openapi_extra=parameters(FindQuery),
)
async def get_change(change_id: str, service: Served, at: Find) -> Response:
    return document(await service.changes.outcome(at.engine, change_id))


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
    openapi_extra=parameters(ReadQuery),
)
async def get_blocks(request: Request, service: Served, at: Read) -> Response:
    blocks = await service.fleet.one(at.engine).bus.ask(commands.Blocks(), wire.BlocksDocument)
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
    openapi_extra=parameters(ReadQuery),
)
async def get_block(block_id: str, service: Served, at: Read) -> Response:
    path = read_model({"block_id": plain(block_id)}, BlockPath)
    engine = service.fleet.one(at.engine)
    return document(await engine.bus.ask(commands.Block(id=path.block_id), wire.BlockDetail))


@router.get(
    "/requests",
    summary="Every request that holds or waits for blocks",
    operation_id="vtoken_requests",
    responses=answers(
        array_of(wire.RequestRow), "All requests that hold blocks, and the first 64 that wait"
    ),
    openapi_extra=parameters(ReadQuery),
)
async def get_requests(service: Served, at: Read) -> Response:
    engine = service.fleet.one(at.engine)
    return document(await engine.bus.ask(commands.Requests(), list[wire.RequestRow]))


@router.get(
    "/requests/{request_id}",
    summary="One request and its block table, or what a finished request kept",
    operation_id="vtoken_request",
    description=REQUEST_ID,
    responses=answers(
        ref(wire.RequestDetail),
        "The request; of finished ones the newest 1,024 are known",
        404,
        409,
    ),
    openapi_extra=parameters(FindQuery),
)
async def get_request(request_id: str, service: Served, at: Find) -> Response:
    engine, name = await service.fleet.holder(at.engine, request_id)
    return document(await engine.bus.ask(commands.Request(id=name), wire.RequestDetail))


@router.get(
    "/requests/{request_id}/tokens",
    summary="The token table of a request, in pages",
    operation_id="vtoken_tokens",
    description=REQUEST_ID,
    openapi_extra=parameters(TokensQuery),
    responses=answers(ref(wire.TokenPage), "Rows in logical order", 404, 409),
)
async def get_tokens(
    request_id: str, service: Served, page: Annotated[TokensQuery, Depends(query(TokensQuery))]
) -> Response:
    engine, name = await service.fleet.holder(page.engine, request_id, running=True)
    call = commands.Tokens(request_id=name, start=page.start, limit=page.limit)
    return document(await engine.bus.ask(call, wire.TokenPage))


@router.get(
    "/requests/{request_id}/text",
    summary="The text of a request, token by token, with the state of each token",
    operation_id="vtoken_text",
    description="The pieces of consecutive tokens concatenate to the text; a character of several "
    "tokens is in the last one's piece. Needs a server started with --vtoken-show-text and the "
    f"right to change things, because prompts may be confidential. {REQUEST_ID}",
    openapi_extra=parameters(TokensQuery),
    responses=answers(ref(wire.TextPage), "Tokens in logical order", 404, 409),
)
async def get_text(
    request: Request,
    request_id: str,
    service: Served,
    page: Annotated[TokensQuery, Depends(query(TokensQuery))],
) -> Response:
    permit_text(request.scope, service.auth)
    engine, name = await service.fleet.holder(page.engine, request_id, running=True)
    call = commands.Text(request_id=name, start=page.start, limit=page.limit)
    source = await engine.bus.ask(call, wire.TextSource)
    text = await asyncio.to_thread(service.texts.decode, source)
    text.engine = engine.rank
    return document(text, headers={"Cache-Control": "no-store"})


@router.get(
    "/events",
    summary="The newest events of the engine, or those after one, oldest first",
    operation_id="vtoken_events",
    openapi_extra=parameters(EventsQuery),
    responses=answers(ref(wire.EventPage), "Events that the engine still holds"),
)
async def get_events(
    service: Served, page: Annotated[EventsQuery, Depends(query(EventsQuery))]
) -> Response:
    call = commands.Events(after=page.after, limit=page.limit, kind=page.kind)
    engine = service.fleet.one(page.engine)
    return document(await engine.bus.ask(call, wire.EventPage))


@router.get(
    "/audit",
    summary="The audit log: changes and dry runs with their callers, newest last",
    operation_id="vtoken_audit",
    openapi_extra=parameters(AuditQuery),
    responses=answers(ref(wire.AuditPage), "Accepted calls, and changes that the engine reverted"),
)
async def get_audit(
    service: Served, page: Annotated[AuditQuery, Depends(query(AuditQuery))]
) -> Response:
    return document(await service.journal.entries(page.limit))


def _prefers_octets(accept: str) -> bool:
    """Whether `Accept` names octets before JSON."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return OCTETS in kinds and "application/json" not in kinds[: kinds.index(OCTETS)]
