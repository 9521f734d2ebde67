"""The REST routes that change something: configuration, compaction, undo.

Knows HTTP and the service. A call that is refused here or by the engine changes nothing; the guard
has already refused every change on a read-only server.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from vtoken import wire
from vtoken_api.access import actor_of
from vtoken_api.inputs import (
    JSON_TYPES,
    CompactionRequest,
    check_query,
    if_match,
    query_flag,
    read_body,
    read_compaction,
    read_patch,
)
from vtoken_api.openapi import MERGE_PATCH_SCHEMA, answers, body, query, ref
from vtoken_api.problems import refuse
from vtoken_api.routes import Served, document, etag

router = APIRouter(tags=["vToken"])

IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "apply only if this is still the revision (ETag of GET /config)",
    "schema": {"type": "string"},
}


@router.patch(
    "/config",
    summary="Change the configuration, all or nothing, between two steps",
    operation_id="vtoken_patch_config",
    openapi_extra={
        "parameters": [
            IF_MATCH,
            query(
                "validate_only",
                {"type": "boolean", "default": False},
                "answer what would happen, change nothing",
            ),
        ],
        **body(MERGE_PATCH_SCHEMA, *JSON_TYPES, required=True),
    },
    responses=answers(
        ref(wire.PatchResult),
        "What the engine has applied, or would",
        400,
        409,
        412,
        413,
        415,
        headers={"ETag": "the revision now"},
    ),
)
async def patch_config(request: Request, service: Served) -> Response:
    check_query(request, ("validate_only",))
    result = await service.patch_config(
        await read_patch(request),
        if_match(request),
        query_flag(request, "validate_only"),
        actor_of(request.headers, request.client),
    )
    return document(result, headers=etag(result.revision))


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
        413,
        415,
        status=202,
        headers={"Location": "the operation"},
    ),
)
async def post_compaction(request: Request, service: Served) -> Response:
    check_query(request)
    wanted = await read_compaction(request)
    operation = await service.compact(wanted, actor_of(request.headers, request.client))
    root = request.scope.get("root_path", "")
    location = {"Location": f"{root}/operations/{operation.id}"}
    return document(operation, status=202, headers=location)


@router.post(
    "/undo",
    summary="Restore the revision before, as a new revision",
    operation_id="vtoken_undo",
    responses=answers(
        ref(wire.PatchResult),
        "What the engine has applied",
        409,
        headers={"ETag": "the revision now"},
    ),
)
async def post_undo(request: Request, service: Served) -> Response:
    check_query(request)
    if await read_body(request, required=False) not in (b"", b"{}"):
        raise refuse(422, "undo takes no body", bound="an empty body")
    result = await service.undo(actor_of(request.headers, request.client))
    return document(result, headers=etag(result.revision))
