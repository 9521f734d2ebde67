"""The REST routes that change something: configuration, confirm, undo, compaction, forget.

A call that is refused, here or by the engine, changes nothing. Readers may call all but the last as
a dry run (`validate_only`, `dry_run`). A route with dry runs calls `permit` as soon as it knows
whether it is one.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from vtoken import wire
from vtoken.wire import commands
from vtoken_api.auth.access import Grant, actor_of
from vtoken_api.auth.check import GRANT, permit
from vtoken_api.changes import Caller
from vtoken_api.problems import refuse
from vtoken_api.rest.inputs import (
    CHANGE_HEADER,
    JSON_TYPES,
    ChangeQuery,
    CompactionRequest,
    EngineQuery,
    FindQuery,
    ForgetRequest,
    PatchQuery,
    SyncQuery,
    change_id,
    if_match,
    query,
    read_compaction,
    read_forget,
    read_patch,
    refuse_body,
)
from vtoken_api.rest.openapi import MERGE_PATCH_SCHEMA, answers, body, parameters, ref
from vtoken_api.rest.raw_route import RawRoute
from vtoken_api.rest.routes import REQUEST_ID, Find, Served, document, etag
from vtoken_api.service import Service

router = APIRouter(tags=["vToken"], route_class=RawRoute)

IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "apply only if this is still the current revision (ETag of GET /config)",
    "schema": {"type": "string"},
}

CHANGE_ID = {
    "name": CHANGE_HEADER,
    "in": "header",
    "required": False,
    "description": "a new id of this change, to look it up with GET /changes/{id}",
    "schema": {"type": "string", "pattern": "^[0-9A-Za-z-]{8,64}$"},
}


def _changed(description: str) -> dict[int | str, dict[str, Any]]:
    """Responses of a call that changes the configuration; `description` is of the good one."""
    return answers(
        ref(wire.PatchResult),
        description,
        400,
        408,
        409,
        412,
        413,
        415,
        headers={"ETag": "the current revision"},
    )


def _caller(request: Request) -> Caller:
    """The caller's name and rights, and the id of its change."""
    grant: Grant = request.scope[GRANT]
    name = actor_of(request.headers, request.client)
    return Caller(name, grant.can_control, change_id(request))


async def _settled(
    request: Request,
    service: Service,
    kind: type[commands.Confirm] | type[commands.Undo],
    options: ChangeQuery,
) -> Response:
    """Confirm or undo a change, or report what that would do."""
    permit(request.scope, service.auth, dry_run=options.validate_only)
    await refuse_body(request, commands.name_of(kind))
    call = kind(if_match=if_match(request), validate_only=options.validate_only)
    result = await service.changes.configure(call, options.engine, _caller(request))
    return document(result, headers=etag(result.revision))


@router.patch(
    "/config",
    summary="Change the configuration atomically, between two steps",
    operation_id="vtoken_patch_config",
    openapi_extra={
        **parameters(PatchQuery, IF_MATCH, CHANGE_ID),
        **body(MERGE_PATCH_SCHEMA, *JSON_TYPES, required=True),
    },
    responses=_changed("The change that the engine applied, or would apply"),
)
async def patch_config(
    request: Request, service: Served, options: Annotated[PatchQuery, Depends(query(PatchQuery))]
) -> Response:
    permit(request.scope, service.auth, dry_run=options.validate_only)
    patch = await read_patch(request)
    call = commands.PatchConfig(
        patch=patch,
        if_match=if_match(request),
        validate_only=options.validate_only,
        **options.terms(),
    )
    caller, canary = _caller(request), options.canary_engine
    if canary is None:
        result = await service.changes.configure(call, options.engine, caller)
    elif options.engine is None:
        result = await service.changes.roll_out(call, canary, caller)
    else:
        raise refuse(
            422,
            "a change goes to one engine, or to one first and then to all",
            field="canary_engine",
            value=canary,
            bound="engine or canary_engine",
        )
    return document(result, headers=etag(result.revision))


@router.post(
    "/confirm",
    summary="Keep the change that is on trial",
    operation_id="vtoken_confirm",
    openapi_extra=parameters(ChangeQuery, IF_MATCH, CHANGE_ID),
    responses=_changed("The change stays; the revision is the same"),
)
async def post_confirm(
    request: Request, service: Served, options: Annotated[ChangeQuery, Depends(query(ChangeQuery))]
) -> Response:
    return await _settled(request, service, commands.Confirm, options)


@router.post(
    "/compactions",
    status_code=202,
    summary="Compact now: overrides the gates, not the safety rules",
    operation_id="vtoken_compact",
    openapi_extra={
        **parameters(EngineQuery, CHANGE_ID),
        **body(ref(CompactionRequest), JSON_TYPES[0], required=False),
    },
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
)
async def post_compaction(
    request: Request, service: Served, at: Annotated[EngineQuery, Depends(query(EngineQuery))]
) -> Response:
    compaction = await read_compaction(request)
    permit(request.scope, service.auth, dry_run=compaction.dry_run)
    call = commands.Compact(**structs.asdict(compaction))
    operation = await service.changes.compact(call, at.engine, _caller(request))
    root = request.scope.get("root_path", "")
    location = {"Location": f"{root}/operations/{operation.id}"}
    return document(operation, status=202, headers=location)


@router.post(
    "/requests/{request_id}/forget",
    summary="Let tokens of a request die before all its others",
    operation_id="vtoken_forget",
    description="The next tokens that the request loses are those of the spans, oldest first, "
    "whatever its policy ranks. Nothing is evicted by the call itself. Calling again adds spans. "
    + REQUEST_ID,
    openapi_extra={
        **parameters(FindQuery, CHANGE_ID),
        **body(ref(ForgetRequest), JSON_TYPES[0], required=True),
    },
    responses=answers(
        ref(wire.Forgotten), "What the request forgets", 400, 404, 408, 409, 413, 415
    ),
)
async def post_forget(request: Request, request_id: str, service: Served, at: Find) -> Response:
    asked = await read_forget(request)
    call = commands.Forget(request_id=request_id, spans=asked.spans)
    return document(await service.changes.forget(call, at.engine, _caller(request)))


@router.post(
    "/requests/{request_id}/end",
    summary="End a streaming-input session for its client",
    operation_id="vtoken_end",
    description="Its blocks are free at once, and its client gets the end of an aborted request. "
    "409 for any other request: it ends by itself. " + REQUEST_ID,
    openapi_extra=parameters(FindQuery, CHANGE_ID),
    responses=answers(ref(wire.Ended), "The session that was ended", 400, 404, 409),
)
async def post_end(request: Request, request_id: str, service: Served, at: Find) -> Response:
    await refuse_body(request, "end")
    call = commands.End(request_id=request_id)
    return document(await service.changes.end(call, at.engine, _caller(request)))


@router.post(
    "/sync",
    summary="Give all engines the configuration of one",
    operation_id="vtoken_sync",
    description="Engines that have it already are unchanged; 409 if all have it.",
    openapi_extra=parameters(SyncQuery, CHANGE_ID),
    responses=_changed("The change that the engines applied, or would apply"),
)
async def post_sync(
    request: Request, service: Served, options: Annotated[SyncQuery, Depends(query(SyncQuery))]
) -> Response:
    permit(request.scope, service.auth, dry_run=options.validate_only)
    await refuse_body(request, "sync")
    result = await service.changes.sync(
        options.engine, _caller(request), dry_run=options.validate_only
    )
    return document(result, headers=etag(result.revision))


@router.post(
    "/undo",
    summary="Restore the previous revision as a new revision",
    operation_id="vtoken_undo",
    openapi_extra=parameters(ChangeQuery, IF_MATCH, CHANGE_ID),
    responses=_changed("The change that the engine applied, or would apply"),
)
async def post_undo(
    request: Request, service: Served, options: Annotated[ChangeQuery, Depends(query(ChangeQuery))]
) -> Response:
    return await _settled(request, service, commands.Undo, options)
