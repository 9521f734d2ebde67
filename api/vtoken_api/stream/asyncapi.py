"""The AsyncAPI 3.0 description of `/vtoken/v1/stream`, served as `GET /asyncapi.json`."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from vtoken import __version__, wire
from vtoken.wire import routes
from vtoken_api.fanout.subscriber import HEARTBEAT_S, MAX_QUEUED
from vtoken_api.rest.openapi import examples, query_schema
from vtoken_api.rest.serving import Asked, Handlers
from vtoken_api.stream.endpoint import AuthMessage

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
    query = {
        "type": "object",
        "additionalProperties": False,
        "properties": query_schema(routes.StreamQuery),
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "vToken stream", "version": __version__, "description": DESCRIPTION},
        "channels": {
            "stream": {
                "address": f"{root}/stream",
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
                "bindings": {"ws": {"query": query}},
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


async def asyncapi(asked: Asked, _: routes.Query) -> dict[str, Any]:
    return description(asked.request.scope["root_path"])


HANDLERS: Handlers = {routes.ASYNCAPI: asyncapi}
