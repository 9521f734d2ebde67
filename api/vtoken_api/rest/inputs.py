"""Reading of client input: queries, bodies and headers, as the structs that a route takes.

A struct has the name, type and bound of every field and accepts no other field. The engine checks
what depends on its state. All functions here raise ProblemError.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from vtoken.wire import Problem
from vtoken.wire.bounds import fault, read_json
from vtoken.wire.routes import CHANGE_HEADER, JSON, MERGE_PATCH, Route
from vtoken_api.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES
from vtoken_api.problems import ProblemError, refuse

JSON_TYPES = (JSON, MERGE_PATCH)
CHANGE_ID = "[0-9A-Za-z-]{8,64}"
_ETAG = re.compile(r'\s*"([0-9]{1,15})"\s*')
_INTEGER = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,9}\.[0-9]{1,6}")

M = TypeVar("M", bound=msgspec.Struct)


def read_model(values: dict[str, Any], kind: type[M]) -> M:
    """`values` as a `kind`; raises ProblemError with the field, the value and the bound."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ProblemError(Problem.of(fault(error, values, kind))) from None


def read_query(connection: HTTPConnection, kind: type[M]) -> M:
    """The query as a `kind`; refuses repeated parameters."""
    values = connection.query_params
    for name in values:
        if len(values.getlist(name)) > 1:
            raise refuse(422, "repeated query parameter", field=name, bound="once")
    return read_model({name: plain(text) for name, text in values.items()}, kind)


def plain(text: str) -> Any:
    """Parse a query value: a boolean, an unsigned number, a JSON list, else the text."""
    if text.startswith("["):
        with suppress(ValueError):
            return read_json(text)
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


async def read_body(request: Request, route: Route[Any]) -> Any:
    """The body as the struct that the route takes, or as the object of a merge patch.

    Raises 400 if there is none and one is needed, or if it is not JSON; 422 if it is not an object,
    or for a route that takes none.
    """
    body = await read_bytes(request)
    if body:
        _require_json(request)
    if route.body is None:
        if body not in (b"", b"{}"):
            raise refuse(422, f"{route.name} accepts no body", bound="an empty body")
        return None
    if not body and route.needs_body:
        raise refuse(400, "the body is empty", bound="a JSON object")
    document = _object(body) if body else {}
    return document if route.body is dict else read_model(document, route.body)


async def read_bytes(request: Request) -> bytes:
    """Read the body, at most MAX_BODY_BYTES; raises 408 and 413.

    Also 400 if the client disconnects before its end; nobody reads that answer.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 9 or int(declared) > MAX_BODY_BYTES):
        raise refuse(413, "the body is too long", bound=f"{MAX_BODY_BYTES} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise refuse(413, "the body is too long", bound=f"{MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        detail = "the body did not arrive in time"
        raise refuse(408, detail, bound=f"{BODY_TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise refuse(400, "the connection ended before the body did") from error
    return bytes(body)


def if_match(request: Request) -> int | None:
    """The revision in `If-Match`; None if it is absent or `*`; raises 400."""
    header = request.headers.get("if-match")
    if header is None or header.strip() == "*":
        return None
    match = _ETAG.fullmatch(header)
    if match is None:
        raise refuse(
            400,
            "If-Match is not a single entity tag of GET /config",
            field="If-Match",
            value=header[:64],
            bound='"REVISION" in double quotes, or *',
        )
    return int(match[1])


def change_id(request: Request) -> str:
    """The id of a change: the caller's, else a new one; raises 400."""
    header = request.headers.get(CHANGE_HEADER)
    if header is None:
        return uuid.uuid4().hex
    if re.fullmatch(CHANGE_ID, header) is None:
        raise refuse(
            400,
            "not an id of a change",
            field=CHANGE_HEADER,
            value=header[:80],
            bound="8 to 64 letters, digits or hyphens, new for every change",
        )
    return header


def _require_json(request: Request) -> None:
    """Raises 415 for a body that is not declared as JSON."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in JSON_TYPES:
        raise refuse(
            415,
            "the body is not declared as JSON",
            field="Content-Type",
            value=content_type,
            bound=" or ".join(JSON_TYPES),
        )


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = read_json(body)
    except ValueError as error:
        raise refuse(400, str(error), title="Malformed JSON") from error
    if not isinstance(document, dict):
        got = type(document).__name__
        raise refuse(422, "the body must be an object", value=got, bound="object")
    return document
