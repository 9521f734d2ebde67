"""The OpenAPI description of the REST interface, from the rows of `vtoken.wire.routes`.

Schema names have the prefix `VToken`, so that they do not collide with those of vLLM's server.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, get_args

import msgspec
from fastapi import FastAPI

from vtoken import wire
from vtoken.wire.routes import CHANGE_HEADER, JSON, ROUTES, GuardParameter, Query, Route
from vtoken_api.problems import PROBLEM_JSON
from vtoken_api.rest.inputs import CHANGE_ID, JSON_TYPES

PREFIX = "VToken"
SECURITY = "VTokenBearer"
REF_TEMPLATE = f"#/components/schemas/{PREFIX}{{name}}"

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
ALWAYS = (401, 403, 422, 429, 503)
OF_CHANGES = (400, 408, 409, 413, 415)

MERGE_PATCH_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Any fields of `desired` in GET /config; the others are unchanged.",
    "examples": [{"theta_f": 0.25}, {"policy": {"name": "h2o", "params": {}}}],
}
BINARY = {"type": "string", "format": "binary"}
HEADER = {"in": "header", "required": False}
IF_MATCH = HEADER | {
    "name": "If-Match",
    "description": "apply only if this is still the current revision (ETag of GET /config)",
    "schema": {"type": "string"},
}
NEW_CHANGE = HEADER | {
    "name": CHANGE_HEADER,
    "description": "a new id of this change, to look it up with GET /changes/{id}",
    "schema": {"type": "string", "pattern": f"^{CHANGE_ID}$"},
}


def document_of(route: Route[Any]) -> Any:
    """The struct that a route answers with, or a list of; another type for a route without one."""
    return (get_args(route.answer) or [route.answer])[0]


DOCUMENTED: tuple[type[msgspec.Struct], ...] = tuple(
    dict.fromkeys(
        kind
        for kind in (
            *map(document_of, ROUTES),
            *(route.body for route in ROUTES),
            wire.Problem,
            GuardParameter,
        )
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )
)


def operation(route: Route[Any]) -> dict[str, Any]:
    """The OpenAPI operation of a route."""
    found: dict[str, Any] = {
        "tags": ["vToken"],
        "summary": route.summary,
        "operationId": f"vtoken_{route.name}",
        "parameters": _parameters(route),
        "responses": {str(route.status): _answer(route)},
        "security": [{SECURITY: []}, {}],
    }
    if route.description:
        found["description"] = route.description
    if route.body is not None:
        schema = MERGE_PATCH_SCHEMA if route.body is dict else _ref(route.body)
        content = {kind: {"schema": schema} for kind in JSON_TYPES}
        found["requestBody"] = {"required": route.needs_body, "content": content}
    problems = {*ALWAYS, *route.problems}
    problems |= {*OF_CHANGES} if route.changes else set()
    problems |= {412} if route.takes_revision else set()
    found["responses"] |= {str(status): _problem(status) for status in sorted(problems)}
    return found


def _answer(route: Route[Any]) -> dict[str, Any]:
    """The good response."""
    kind = document_of(route)
    schema: dict[str, Any] = _ref(kind) if kind in DOCUMENTED else {"type": "object"}
    if kind is not route.answer and kind in DOCUMENTED:
        schema = {"type": "array", "items": schema}
    headers = {}
    if kind in (wire.ConfigDocument, wire.PatchResult):
        headers["ETag"] = "the current revision, for If-Match"
    if route.status == HTTPStatus.ACCEPTED:
        headers["Location"] = "the operation"
    return {
        "description": route.answered or route.summary,
        "content": {name: {"schema": schema if name == JSON else BINARY} for name in route.content},
        "headers": {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in headers.items()
        },
    }


def _problem(status: int) -> dict[str, Any]:
    """The response with a problem document of this status."""
    example = wire.Problem(status, title=HTTPStatus(status).phrase, detail=PROBLEMS[status])
    content = {"schema": _ref(wire.Problem), "example": msgspec.to_builtins(example)}
    return {"description": PROBLEMS[status], "content": {PROBLEM_JSON: content}}


def _ref(kind: type) -> dict[str, Any]:
    """A reference to the schema of a wire struct."""
    return {"$ref": REF_TEMPLATE.format(name=kind.__name__)}


def _parameters(route: Route[Any]) -> list[dict[str, Any]]:
    """What a route takes in path, headers and query."""
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.parameters
    ]
    found += [IF_MATCH] if route.takes_revision else []
    found += [NEW_CHANGE] if route.changes else []
    for name, schema in query_schema(route.query).items():
        description = schema.pop("description", "")
        shown = {"schema": schema}
        if schema.get("type") == "array":
            shown = {"content": {JSON: shown}}
        found.append(
            {"name": name, "in": "query", "required": False, "description": description} | shown
        )
    return found


def query_schema(kind: type[Query]) -> dict[str, Any]:
    """Parameter -> its JSON schema. None is to leave an optional one out: a query has no null."""
    _, schemas = msgspec.json.schema_components([kind], ref_template=REF_TEMPLATE)
    properties: dict[str, Any] = schemas[kind.__name__]["properties"]
    for schema in properties.values():
        if schema.get("default", msgspec.UNSET) is None:
            del schema["default"]
            (given,) = [part for part in schema.pop("anyOf") if part != {"type": "null"}]
            schema.update(given)
    return properties


@cache
def examples() -> dict[str, Any]:
    """One example a struct, by the struct's name: what a real server answers, sends and accepts.

    `make tables` records `examples.json`. It is read when a description is first requested.
    """
    packed = files("vtoken_api.rest").joinpath("examples.json").read_bytes()
    return msgspec.json.decode(packed, type=dict[str, Any])


def components() -> dict[str, Any]:
    """JSON schemas of all documented structs, each with an example, by prefixed name."""
    _, schemas = msgspec.json.schema_components(DOCUMENTED, ref_template=REF_TEMPLATE)
    for kind in DOCUMENTED:
        schemas[kind.__name__]["examples"] = [examples()[kind.__name__]]
    return {f"{PREFIX}{name}": schema for name, schema in schemas.items()}


def merge_into(app: FastAPI, path: str) -> None:
    """Add all routes, under `path`, to `app.openapi()`."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = own()
            for route in ROUTES:
                operations = document["paths"].setdefault(f"{path}{route.path}", {})
                operations[route.method.lower()] = operation(route)
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
