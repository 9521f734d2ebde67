"""The OpenAPI description is complete and has no dangling reference."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from fastapi import FastAPI

from tests.support.routes import every_route
from vtoken import wire
from vtoken.wire.routes import StreamQuery, fields_of
from vtoken_api.plugin import MOUNT_PATH, VTokenEndpointPlugin
from vtoken_api.problems import PROBLEM_JSON
from vtoken_api.stream.asyncapi import description

METHODS = {"get", "post", "patch", "put", "delete"}


def references(node: Any) -> set[str]:
    """Every `$ref` below `node`."""
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


@pytest.fixture
def document() -> dict[str, Any]:
    app = FastAPI()
    VTokenEndpointPlugin().attach_router(app)
    return app.openapi()


def test_every_route_is_described_with_its_answer_and_its_problems(
    document: dict[str, Any],
) -> None:
    described = {
        (path.removeprefix(MOUNT_PATH), method)
        for path, operations in document["paths"].items()
        for method in operations
    }
    served = {(path, method.lower()) for method, path in every_route() if method != "WS"}
    assert described == served
    assert len(served) == 23
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert operation["operationId"].startswith("vtoken_")
            good = [code for code in operation["responses"] if code.startswith("2")]
            assert good in (["200"], ["202"])
            for code, answer in operation["responses"].items():
                if code not in good:
                    assert list(answer["content"]) == [PROBLEM_JSON]


def test_no_reference_dangles(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas


def test_schemas_name_every_field_of_the_wire(document: dict[str, Any]) -> None:
    for kind in (wire.Status, wire.ConfigDocument, wire.PatchResult, wire.Problem):
        properties = document["components"]["schemas"][f"VToken{kind.__name__}"]["properties"]
        assert set(properties) == {field.name for field in msgspec.structs.fields(kind)}


def test_description_of_the_host_server_is_kept() -> None:
    app = FastAPI(title="host")

    @app.get("/v1/models")
    async def models() -> dict[str, str]:
        return {}

    alone = app.openapi()
    app.openapi_schema = None
    VTokenEndpointPlugin().attach_router(app)
    both = app.openapi()
    assert both["info"] == alone["info"]
    assert both["paths"]["/v1/models"] == alone["paths"]["/v1/models"]
    assert app.openapi() is both


def test_stream_is_described_message_by_message() -> None:
    stream = description()
    tags = {kind.__struct_config__.tag for kind in get_args(wire.StreamMessage)}
    assert set(stream["components"]["messages"]) == tags | {"auth"}
    assert set(stream["channels"]["stream"]["messages"]) == tags | {"auth"}
    for reference in references(stream):
        node = stream
        for name in reference.removeprefix("#/").split("/"):
            node = node[name]
    query = stream["channels"]["stream"]["bindings"]["ws"]["query"]["properties"]
    assert set(query) == set(fields_of(StreamQuery))
