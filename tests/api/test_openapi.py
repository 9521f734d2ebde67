"""The API descriptions are complete and correct: routes, schemas, and examples that are real."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import jsonschema
import msgspec
import pytest
from fastapi import FastAPI
from websockets.asyncio.client import connect

from tests.docs.examples import FILE, make
from tests.support.core.live import LiveEngine
from tests.support.routes import every_route, openapi_document
from tests.support.serving import Served
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.wire.routes import StreamQuery, fields_of
from vtoken_api.fanout.subscriber import MAX_QUEUED
from vtoken_api.plugin import MOUNT_PATH, VTokenEndpointPlugin
from vtoken_api.problems import PROBLEM_JSON
from vtoken_api.rest.openapi import DOCUMENTED, PROBLEMS, examples
from vtoken_api.stream.asyncapi import description
from vtoken_api.stream.endpoint import AuthMessage

DRAFT = jsonschema.Draft202012Validator
MESSAGES = (*get_args(wire.StreamMessage), AuthMessage)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_document()


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for path in document["paths"].values() for operation in path.values()]


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raises unless `value` fits `schema`, references resolved in `document`."""
    whole = {**schema, "components": document["components"]}
    DRAFT.check_schema(schema)
    DRAFT(whole).validate(value)


def reread(value: Any, kind: Any) -> Any:
    """`value` as a client reads it and writes it again."""
    return msgspec.json.decode(msgspec.json.encode(msgspec.convert(value, kind)))


def references(node: Any) -> set[str]:
    """Every `$ref` below `node`."""
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


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
    assert len(served) == 24
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


async def test_examples_are_what_a_server_answers_and_sends() -> None:
    made, held = (msgspec.json.decode(text) for text in (await make(), FILE.read_text()))
    stale = [name for name in {**made, **held} if made.get(name) != held.get(name)]
    assert not stale, "run make tables"


def test_every_described_struct_has_an_example_that_fits(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for kind in DOCUMENTED:
        schema = schemas[f"VToken{kind.__name__}"]
        (example,) = schema["examples"]
        check(document, schema, example)
        assert reread(example, kind) == example
    assert set(examples()) == {kind.__name__ for kind in (*DOCUMENTED, *MESSAGES)}


def test_every_problem_has_an_example_of_its_status(document: dict[str, Any]) -> None:
    seen = set()
    for operation in operations(document):
        for code, answer in operation["responses"].items():
            if not code.startswith("2"):
                content = answer["content"][PROBLEM_JSON]
                assert content["example"]["status"] == int(code)
                check(document, content["schema"], content["example"])
                seen.add(int(code))
    assert seen == set(PROBLEMS)


def message_schema(stream: dict[str, Any], tag: str) -> dict[str, Any]:
    payload: dict[str, Any] = stream["components"]["messages"][tag]["payload"]
    return payload


def test_every_message_has_an_example_that_fits() -> None:
    stream = description()
    for kind in MESSAGES:
        tag = str(kind.__struct_config__.tag)
        (example,) = stream["components"]["messages"][tag]["examples"]
        check(stream, message_schema(stream, tag), example["payload"])
        assert reread(example["payload"], kind) == example["payload"]


async def test_real_messages_of_every_kind_fit_their_schemas(
    core: LiveEngine, served: Served
) -> None:
    stream = description()
    validators = {
        tag: DRAFT({**message_schema(stream, tag), "components": stream["components"]})
        for tag in stream["components"]["messages"]
    }
    seen: dict[str, int] = {}

    async def take() -> Any:
        message = msgspec.json.decode(await asyncio.wait_for(socket.recv(), LIMIT_S))
        validators[message["type"]].validate(message)
        seen[message["type"]] = seen.get(message["type"], 0) + 1
        return message

    async with connect(served.stream_url + "?fps=30", max_size=None) as socket:
        await take()
        await take()
        core.configure(reclamation="auto", theta_f=0.0)
        core.admit("c", 40)
        core.steps(2)
        patched = await served.http.patch("/vtoken/v1/config", json={"budget_tokens": 48})
        assert patched.status_code == 200
        core.steps(5)
        core.finish("c")
        core.steps()
        while not {"hello", "snapshot", "delta", "event"} <= set(seen):
            await take()
        flood = [wire.Event(seq=10**6 + n, ts=0.0, step=1, kind="server", summary="x")
                 for n in range(MAX_QUEUED + 1)]  # fmt: skip
        for listener in tuple(served.engine.hub._listeners):
            listener.offer(flood, 0)
        while "dropped" not in seen:
            await take()
        assert (await take())["type"] == "snapshot"
    async with connect(served.stream_url + "?topics=events") as socket:
        while "heartbeat" not in seen:  # state would come before the silence is long enough
            await take()
    assert set(seen) == {kind.__struct_config__.tag for kind in get_args(wire.StreamMessage)}


def test_stream_document_has_the_shape_of_asyncapi_3() -> None:
    """The parts of the AsyncAPI 3.0.0 specification that this document uses, field by field."""
    stream = description()
    assert set(stream) == {"asyncapi", "info", "channels", "operations", "components"}
    assert stream["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(stream["info"])
    for channel in stream["channels"].values():
        assert set(channel) <= {"address", "messages", "bindings", "title", "summary"}
        assert channel["address"].startswith("/")
        assert set(channel["bindings"]["ws"]) <= {"method", "query", "headers", "bindingVersion"}
        DRAFT.check_schema(channel["bindings"]["ws"]["query"])
    for operation in stream["operations"].values():
        assert operation["action"] in ("send", "receive")
        assert set(operation["channel"]) == {"$ref"}
        for message in operation["messages"]:  # of the channel, not of the components (3.0.0)
            assert message["$ref"].startswith(operation["channel"]["$ref"] + "/messages/")
    for message in stream["components"]["messages"].values():
        assert set(message) <= {"title", "summary", "payload", "examples", "contentType"}
    for schema in stream["components"]["schemas"].values():
        DRAFT.check_schema(schema)


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("Heartbeat", "seq", "7"),
        ("Hello", "geometry", None),
        ("EventMessage", "event", {}),
        ("Dropped", "n", 1.5),
    ],
)
def test_schemas_refuse_what_the_wire_refuses(name: str, field: str, wrong: Any) -> None:
    stream = description()
    message = {**examples()[name], field: wrong}
    with pytest.raises(jsonschema.ValidationError):
        check(stream, message_schema(stream, message["type"]), message)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(message, wire.StreamMessage)
