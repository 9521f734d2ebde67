"""The OpenAPI description of the REST routes, from the structs of `vtoken.wire`.

Schema names have the prefix `VToken`, so that they do not collide with those of vLLM's server.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI

from vtoken import wire
from vtoken_api.problems import PROBLEM_JSON
from vtoken_api.rest.examples import examples
from vtoken_api.rest.inputs import CompactionRequest, ForgetRequest, GuardParameter

PREFIX = "VToken"
SECURITY = "VTokenBearer"
REF_TEMPLATE = f"#/components/schemas/{PREFIX}{{name}}"

DOCUMENTED: tuple[Any, ...] = (
    wire.Status,
    wire.ConfigDocument,
    wire.PatchResult,
    wire.PolicyInfo,
    wire.Operation,
    wire.Forgotten,
    wire.Ended,
    wire.Change,
    wire.BlocksDocument,
    wire.BlockDetail,
    wire.RequestRow,
    wire.RequestDetail,
    wire.TokenPage,
    wire.TextPage,
    wire.EventPage,
    wire.AuditPage,
    wire.Fleet,
    wire.Problem,
    CompactionRequest,
    ForgetRequest,
    GuardParameter,
)

PROBLEMS: dict[int, str] = {
    400: "Malformed: not JSON, or not an entity tag",
    401: "The token is missing or wrong, or is in the URL",
    403: "Forbidden: needs the control token, text is not shown, or another site's page or host",
    404: "Unknown id",
    408: "The body did not arrive within 10 s",
    409: "Conflicts with the current state",
    412: "If-Match names a revision that is no longer current",
    413: "The body is longer than 64 KiB",
    415: "The body is not declared as JSON",
    422: "A field or a value is invalid; nothing was changed",
    429: "Too many calls are waiting or came from this address, or reads or dry runs used their "
    "share of the engine's thread; Retry-After says when to call again",
    503: "The engine has stopped or does not answer",
}

MERGE_PATCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Any fields of `desired` in GET /config; the others are unchanged.",
    "examples": [{"theta_f": 0.25}, {"policy": {"name": "h2o", "params": {}}}],
}


def ref(kind: type) -> dict[str, Any]:
    """A reference to the schema of a wire struct."""
    return {"$ref": REF_TEMPLATE.format(name=kind.__name__)}


def array_of(kind: type) -> dict[str, Any]:
    return {"type": "array", "items": ref(kind)}


def answers(
    schema: dict[str, Any],
    description: str,
    *problems: int,
    status: int = 200,
    headers: dict[str, str] | None = None,
    more_content: dict[str, Any] | None = None,
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: the successful one, and problem documents for the rest."""
    good: dict[str, Any] = {
        "description": description,
        "content": {"application/json": {"schema": schema}, **(more_content or {})},
    }
    if headers:
        good["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in headers.items()
        }
    codes = sorted({401, 403, 422, 429, 503, *problems})
    return {status: good, **{code: _problem(code) for code in codes}}


def _problem(status: int) -> dict[str, Any]:
    """The response with a problem document of this status."""
    example = wire.Problem(status, title=HTTPStatus(status).phrase, detail=PROBLEMS[status])
    content = {"schema": ref(wire.Problem), "example": msgspec.to_builtins(example)}
    return {"description": PROBLEMS[status], "content": {PROBLEM_JSON: content}}


def body(schema: dict[str, Any], *content_types: str, required: bool) -> dict[str, Any]:
    """The `requestBody` of a route."""
    content = {kind: {"schema": schema} for kind in content_types}
    return {"requestBody": {"required": required, "content": content}}


def parameters(kind: type[msgspec.Struct], *others: dict[str, Any]) -> dict[str, Any]:
    """The `parameters` of a route: `others` and the fields of its query model."""
    _, schemas = msgspec.json.schema_components([kind], ref_template=REF_TEMPLATE)
    found = [*others]
    for name, schema in schemas[kind.__name__]["properties"].items():
        description = schema.pop("description", "")
        if schema.get("default", msgspec.UNSET) is None:  # optional: a query has no null
            del schema["default"]
            (schema,) = [part for part in schema["anyOf"] if part != {"type": "null"}]
        is_json = schema.get("type") == "array"
        found.append(
            {"name": name, "in": "query", "required": False, "description": description}
            | (
                {"content": {"application/json": {"schema": schema}}}
                if is_json
                else {"schema": schema}
            )
        )
    return {"parameters": found}


def components() -> dict[str, Any]:
    """JSON schemas of all documented structs, each with an example, by prefixed name."""
    _, schemas = msgspec.json.schema_components(DOCUMENTED, ref_template=REF_TEMPLATE)
    for kind in DOCUMENTED:
        schemas[kind.__name__]["examples"] = [examples()[kind.__name__]]
    return {f"{PREFIX}{name}": schema for name, schema in schemas.items()}


def merge_into(app: FastAPI, mounted: FastAPI, path: str) -> None:
    """Add the routes of `mounted`, under `path`, to `app.openapi()`."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = own()
            described = mounted.openapi()["paths"]
            for route, operations in described.items():
                for operation in operations.values():
                    operation["security"] = [{SECURITY: []}, {}]
                document["paths"][f"{path}{route}"] = operations
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(components())
            document["components"].setdefault("securitySchemes", {})[SECURITY] = {
                "type": "http",
                "scheme": "bearer",
                "description": "read or control token, or vLLM's API key; see docs/security.md",
            }
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
