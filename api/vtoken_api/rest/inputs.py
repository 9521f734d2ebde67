"""Parsing of client input: models of queries and bodies.

A model has the name, type and bound of every field and accepts no other field. The engine checks
what depends on its state. All functions here raise `RefusedError` or `ProblemError`, which become
problem documents.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from vtoken import wire
from vtoken.wire.bounds import fault, read_json
from vtoken.wire.commands import TrialSeconds
from vtoken_api.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES
from vtoken_api.problems import refuse
from vtoken_api.state.segments import MAX_AGE_S

JSON_TYPES = ("application/json", "application/merge-patch+json")
MAX_ID = 2**31 - 1
MAX_SEQ = 2**53 - 1
EVENTS_LIMIT = 1000
TOKENS_LIMIT = 4096
CHANGE_HEADER = "X-VToken-Change"
_CHANGE_ID = re.compile(r"[0-9A-Za-z-]{8,64}")
_ETAG = re.compile(r'\s*"([0-9]{1,18})"\s*')
_INTEGER = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,9}\.[0-9]{1,6}")


TokenId = Annotated[int, Meta(ge=0, le=MAX_ID)]


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of queries and bodies."""


class NoQuery(Model, frozen=True):
    pass


Rank = Annotated[int, Meta(ge=0, le=MAX_ID)]
ReadRank = Annotated[
    Rank | None,
    Meta(description="rank of the engine, see GET /engines; needed if the server has several"),
]
FindRank = Annotated[
    Rank | None, Meta(description="rank of the engine, see GET /engines; all are asked without it")
]
ChangeRank = Annotated[
    Rank | None, Meta(description="rank of the engine, see GET /engines; all change without it")
]


class ReadQuery(Model, frozen=True):
    engine: ReadRank = None


class FindQuery(Model, frozen=True):
    engine: FindRank = None


class EngineQuery(Model, frozen=True):
    engine: ChangeRank = None


class BlockPath(Model, frozen=True):
    block_id: Annotated[int, Meta(ge=0, le=MAX_ID)]


class TokensQuery(FindQuery, frozen=True):
    start: Annotated[int, Meta(ge=0, le=MAX_ID, description="first token id")] = 0
    limit: Annotated[int, Meta(ge=1, le=TOKENS_LIMIT, description="most rows")] = 256


class EventsQuery(ReadQuery, frozen=True):
    after: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SEQ)] | None,
        Meta(description="last seq seen: the events after it; the newest ones without it"),
    ] = None
    limit: Annotated[int, Meta(ge=1, le=EVENTS_LIMIT, description="most events")] = 100
    kind: Annotated[wire.EventKind | None, Meta(description="of this kind only")] = None


class AuditQuery(Model, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=EVENTS_LIMIT, description="most entries")] = 100


class RecordingQuery(ReadQuery, frozen=True):
    seconds: Annotated[int, Meta(ge=1, le=int(MAX_AGE_S), description="how far back")] = 300


ValidateOnly = Annotated[
    bool, Meta(description="dry run: report the effect and change nothing; needs read access only")
]


class ChangeQuery(EngineQuery, frozen=True):
    validate_only: ValidateOnly = False


class SyncQuery(Model, frozen=True):
    engine: Annotated[
        Rank | None,
        Meta(
            description="rank of the engine whose configuration all get; without it, the one that "
            "most have"
        ),
    ] = None
    validate_only: ValidateOnly = False


class GuardParameter(wire.Guard, forbid_unknown_fields=True, omit_defaults=True):
    """A guard as a client asks for it; `value` and `count` are ignored."""


class PatchQuery(Model, frozen=True):
    """The fields have the names of `vtoken.wire.commands.PatchConfig`."""

    engine: ChangeRank = None
    validate_only: ValidateOnly = False
    confirm_within_s: Annotated[
        TrialSeconds | None,
        Meta(description="revert the change unless it is confirmed within this time"),
    ] = None
    guards: Annotated[
        tuple[GuardParameter, ...],
        Meta(
            description="revert the change if a metric crosses a limit: "
            '[{"metric": "preemptions", "above": 0}]; see docs/changes.md'
        ),
    ] = ()
    guard_for_s: Annotated[
        TrialSeconds | None,
        Meta(
            description="how long the guards are active; default confirm_within_s, or "
            f"{wire.GUARD_SECONDS} s without it"
        ),
    ] = None

    canary_engine: Annotated[
        Rank | None,
        Meta(
            description="make the change on this engine first, on trial; the others follow by "
            "themselves when its guards have held, and it is confirmed if confirm_within_s is given"
        ),
    ] = None

    def terms(self) -> dict[str, Any]:
        """The terms of a trial as arguments of `PatchConfig`."""
        return {
            "confirm_within_s": self.confirm_within_s,
            "guards": list(self.guards),
            "guard_for_s": self.guard_for_s,
        }


class CompactionRequest(Model, frozen=True):
    """Body of `POST /compactions`; every field is optional."""

    request_id: str | None = None  # None: every request
    batch_size: int | None = None  # None: the configured B
    dry_run: bool = False


class ForgetRequest(Model, frozen=True):
    """Body of `POST /requests/{id}/forget`: [start, end) of token ids, prompt and output."""

    spans: Annotated[list[tuple[TokenId, TokenId]], Meta(min_length=1)]


M = TypeVar("M", bound=msgspec.Struct)


def read_model(values: dict[str, Any], kind: type[M]) -> M:
    """`values` as a `kind`; raises RefusedError with the field, the value and the bound."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise fault(error, values, kind) from None


def query(kind: type[M]) -> Callable[[Request], Awaitable[M]]:
    """The dependency that reads the query as a `kind`; refuses repeated parameters."""

    async def read(request: Request) -> M:
        values = request.query_params
        for name in values:
            if len(values.getlist(name)) > 1:
                raise refuse(422, "repeated query parameter", field=name, bound="once")
        return read_model({name: plain(text) for name, text in values.items()}, kind)

    return read


def plain(text: str) -> Any:
    """Parse a query value: a boolean, an unsigned number, a JSON list, else 64 characters."""
    if text.startswith("["):
        with suppress(ValueError):
            return read_json(text)
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text[:64]


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


async def read_body(request: Request, *, required: bool) -> bytes:
    """Read a body that is declared as JSON; raises 400, 408, 413, 415."""
    body = await read_bytes(request)
    if not body:
        if required:
            raise refuse(400, "the body is empty", bound="a JSON object")
        return b""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in JSON_TYPES:
        raise refuse(
            415,
            "the body is not declared as JSON",
            field="Content-Type",
            value=content_type,
            bound=" or ".join(JSON_TYPES),
        )
    return body


async def read_patch(request: Request) -> dict[str, Any]:
    """The merge patch in the body; raises 400 if it is not JSON, 422 if it is not an object."""
    return _object(await read_body(request, required=True), "a merge patch")


async def read_compaction(request: Request) -> CompactionRequest:
    """The body of `POST /compactions`; an empty one compacts every request."""
    body = await read_body(request, required=False)
    return read_model(_object(body, "the body") if body else {}, CompactionRequest)


async def read_forget(request: Request) -> ForgetRequest:
    """The body of `POST /requests/{id}/forget`."""
    body = await read_body(request, required=True)
    return read_model(_object(body, "the body"), ForgetRequest)


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
    if _CHANGE_ID.fullmatch(header) is None:
        raise refuse(
            400,
            "not an id of a change",
            field=CHANGE_HEADER,
            value=header[:80],
            bound="8 to 64 letters, digits or hyphens, new for every change",
        )
    return header


async def refuse_body(request: Request, call: str) -> None:
    """Raises 422 if the request has a body; `call` accepts none."""
    if await read_body(request, required=False) not in (b"", b"{}"):
        raise refuse(422, f"{call} accepts no body", bound="an empty body")


def _object(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = read_json(body)
    except ValueError as error:
        raise refuse(400, str(error), title="Malformed JSON") from error
    if not isinstance(document, dict):
        got = type(document).__name__
        raise refuse(422, f"{what} must be an object", value=got, bound="object")
    return document
