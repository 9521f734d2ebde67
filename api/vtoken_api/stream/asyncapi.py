"""The AsyncAPI 3.0 description of `/vtoken/v1/stream`, served as `GET /asyncapi.json`."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from vtoken import __version__, wire
from vtoken_api.fanout.cursor import TOPICS
from vtoken_api.fanout.session import HEARTBEAT_S, MAX_QUEUED
from vtoken_api.rest.examples import examples
from vtoken_api.rest.inputs import NoQuery, query
from vtoken_api.rest.openapi import answers
from vtoken_api.rest.routes import document
from vtoken_api.stream.endpoint import DEFAULT_FPS, MAX_FPS, MIN_FPS, AuthMessage

DESCRIPTION = f"""\
The stream of one engine sends hello, a snapshot, then deltas and events, and a heartbeat after
{HEARTBEAT_S:g} s without a message. `seq` rises by one with every message. State is coalesced to
the client's rate, newest wins; a snapshot with every later delta applied is the newest state.
Blocks are of the `step` of their message. Status, requests and configuration are updated twice a
second, and at once when a request arrives or ends or a command is answered; `status.step` is
their step. Up to {MAX_QUEUED:,} events are queued for a slow client. Beyond that events are
dropped; `dropped` has their number, and a fresh snapshot follows. A refused client gets an HTTP
problem document before the handshake, or close code 4000 + HTTP status after it. Code 1008: the
client reads too slowly; 1011: an internal server error. Packed arrays are little-endian bytes in
msgpack and lists of integers in JSON."""

QUERY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "topics": {
            "type": "string",
            "description": f"comma-separated list of {', '.join(TOPICS)}; default: all",
        },
        "fps": {
            "type": "number",
            "minimum": MIN_FPS,
            "maximum": MAX_FPS,
            "default": DEFAULT_FPS,
        },
        "format": {"type": "string", "enum": ["json", "msgpack"], "default": "json"},
        "resume": {
            "type": "string",
            "description": "EPOCH:SEQ, with the SEQ of the last event seen; see `resumed` in hello",
        },
        "engine": {
            "type": "integer",
            "minimum": 0,
            "description": "rank of the engine; default: the server's first. `hello.engines` has "
            "all",
        },
    },
}

router = APIRouter(tags=["vToken"])


def description(root: str = "/vtoken/v1") -> dict[str, Any]:
    """The AsyncAPI 3.0 document; `root`: the path below which the stream is."""
    sent = get_args(wire.StreamMessage)
    _, schemas = msgspec.json.schema_components(
        (*sent, AuthMessage), ref_template="#/components/schemas/{name}"
    )
    messages = {
        kind.__struct_config__.tag: {
            "title": kind.__name__,
            "summary": (kind.__doc__ or "").partition("\n")[0],
            "contentType": "application/json",
            "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
            "examples": [{"payload": examples()[kind.__name__]}],
        }
        for kind in (*sent, AuthMessage)
    }
    channel = "#/channels/stream"
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "vToken stream", "version": __version__, "description": DESCRIPTION},
        "channels": {
            "stream": {
                "address": f"{root}/stream",
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
                "bindings": {"ws": {"query": QUERY}},
            }
        },
        "operations": {
            "stream": {
                "action": "send",
                "channel": {"$ref": channel},
                "messages": [
                    {"$ref": f"{channel}/messages/{name}"} for name in messages if name != "auth"
                ],
            },
            "authenticate": {
                "action": "receive",
                "summary": "first message of a client that cannot set the Authorization header",
                "channel": {"$ref": channel},
                "messages": [{"$ref": f"{channel}/messages/auth"}],
            },
        },
        "components": {"messages": messages, "schemas": schemas},
    }


@router.get(
    "/asyncapi.json",
    summary="The stream `/vtoken/v1/stream`, described in AsyncAPI 3.0",
    operation_id="vtoken_asyncapi",
    responses=answers({"type": "object"}, "The AsyncAPI document"),
    dependencies=[Depends(query(NoQuery))],
)
async def get_asyncapi(request: Request) -> Response:
    return document(description(request.scope["root_path"]))
