"""The REST routes that change something: configuration, confirm, undo, compaction.

Knows HTTP and the service. A call that is refused here or by the engine changes nothing. Who may
only read may try all of them out (`validate_only`, `dry_run`): that changes nothing either, and a
route asks `permit` before it does anything else.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from vtoken import commands, wire
from vtoken_api.auth.access import Grant, actor_of
from vtoken_api.auth.guard import GRANT, permit
from vtoken_api.rest.inputs import (
    JSON_TYPES,
    ChangeQuery,
    CompactionRequest,
    PatchQuery,
    if_match,
    query,
    read_compaction,
    read_nothing,
    read_patch,
)
from vtoken_api.rest.openapi import MERGE_PATCH_SCHEMA, answers, body, parameters, ref
from vtoken_api.rest.routes import NO_QUERY, Served, document, etag
from vtoken_api.service import Caller, Service

router = APIRouter(tags=["vToken"])

IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "apply only if this is still the revision (ETag of GET /config)",
    "schema": {"type": "string"},
}


def _changed(told: str) -> dict[int | str, dict[str, Any]]:
    """Answers of a call that changes the configuration; `told`: what the result is."""
    return answers(
        ref(wire.PatchResult),
        told,
        400,
        408,
        409,
        412,
        413,
        415,
        headers={"ETag": "the revision now"},
    )


def _caller(request: Request) -> Caller:
    """Who is calling, and whether it is somebody who may change things."""
    grant: Grant = request.scope[GRANT]
    return Caller(actor_of(request.headers, request.client), grant.can_control)


async def _settled(
    request: Request,
    service: Service,
    kind: type[commands.Confirm] | type[commands.Undo],
    *,
    dry_run: bool,
) -> Response:
    """Keep the change that is on trial, or restore the revision before; or say what it does."""
    permit(request.scope, service.auth, dry_run=dry_run)
    await read_nothing(request, commands.name_of(kind))
    call = kind(if_match=if_match(request), validate_only=dry_run)
    result = await service.settle(call, _caller(request))
    return document(result, headers=etag(result.revision))


@router.patch(
    "/config",
    summary="Change the configuration, all or nothing, between two steps",
    operation_id="vtoken_patch_config",
    openapi_extra={
        **parameters(PatchQuery, IF_MATCH),
        **body(MERGE_PATCH_SCHEMA, *JSON_TYPES, required=True),
    },
    responses=_changed("What the engine has applied, or would"),
)
async def patch_config(
    request: Request, service: Served, asked: Annotated[PatchQuery, Depends(query(PatchQuery))]
) -> Response:
    permit(request.scope, service.auth, dry_run=asked.validate_only)
    patch = await read_patch(request)
    call = commands.PatchConfig(patch=patch, if_match=if_match(request), **structs.asdict(asked))
    result = await service.patch_config(call, _caller(request))
    return document(result, headers=etag(result.revision))


@router.post(
    "/confirm",
    summary="Keep the change that is on trial",
    operation_id="vtoken_confirm",
    openapi_extra=parameters(ChangeQuery, IF_MATCH),
    responses=_changed("It stays; the revision is the same"),
)
async def post_confirm(
    request: Request, service: Served, asked: Annotated[ChangeQuery, Depends(query(ChangeQuery))]
) -> Response:
    return await _settled(request, service, commands.Confirm, dry_run=asked.validate_only)


@router.post(
    "/compactions",
    status_code=202,
    summary="Compact now: the gates are overridden, the safety rules are not",
    operation_id="vtoken_compact",
    openapi_extra=body(ref(CompactionRequest), JSON_TYPES[0], required=False),
    responses=answers(
        ref(wire.Operation),
        "Accepted; follow Location",
        400,
        404,
        409,
        408,
        413,
        415,
        status=202,
        headers={"Location": "the operation"},
    ),
    dependencies=NO_QUERY,
)
async def post_compaction(request: Request, service: Served) -> Response:
    wanted = await read_compaction(request)
    permit(request.scope, service.auth, dry_run=wanted.dry_run)
    call = commands.Compact(**structs.asdict(wanted))
    operation = await service.compact(call, _caller(request))
    root = request.scope.get("root_path", "")
    location = {"Location": f"{root}/operations/{operation.id}"}
    return document(operation, status=202, headers=location)


@router.post(
    "/undo",
    summary="Restore the revision before, as a new revision",
    operation_id="vtoken_undo",
    openapi_extra=parameters(ChangeQuery, IF_MATCH),
    responses=_changed("What the engine has applied, or would"),
)
async def post_undo(
    request: Request, service: Served, asked: Annotated[ChangeQuery, Depends(query(ChangeQuery))]
) -> Response:
    return await _settled(request, service, commands.Undo, dry_run=asked.validate_only)
