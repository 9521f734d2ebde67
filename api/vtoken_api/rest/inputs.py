"""What clients send, checked for shape: bodies, query values, preconditions.

Knows HTTP, not the meaning of a value: whether a field or a bound holds is the engine's to say.
Everything here raises ProblemError and changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request

from vtoken.bounds import read_json
from vtoken_api.problems import ProblemError, refuse

MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0
JSON_TYPES = ("application/json", "application/merge-patch+json")
_ETAG = re.compile(r'\s*"([0-9]{1,18})"\s*')
_INTEGER = re.compile(r"[0-9]{1,18}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")


TRIAL_PARAMETERS = (
    "confirm_within_s",
    "guard_inter_token_p95_ms",
    "guard_preemptions",
    "guard_for_s",
)


class CompactionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /compactions`; every field may be left out."""

    request_id: str | None = None  # None: every request
    batch_size: int | None = None  # None: the configured B
    dry_run: bool = False


async def read_body(request: Request, *, required: bool) -> bytes:
    """The body, at most MAX_BODY_BYTES of JSON by its content type; raises 400, 408, 413, 415."""
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
    return bytes(body)


async def read_patch(request: Request) -> dict[str, Any]:
    """The merge patch in the body; raises 400 for what is not JSON, 422 for what is no object."""
    patch = _decode(await read_body(request, required=True))
    if not isinstance(patch, dict):
        raise refuse(422, "a merge patch is an object", value=type(patch).__name__, bound="object")
    return patch


async def read_compaction(request: Request) -> CompactionRequest:
    """The body of `POST /compactions`; an empty one asks for everything."""
    body = await read_body(request, required=False)
    if not body:
        return CompactionRequest()
    document = _decode(body)
    try:
        return msgspec.convert(document, CompactionRequest)
    except msgspec.ValidationError as error:
        raise _invalid(error, document, CompactionRequest) from error


def if_match(request: Request) -> int | None:
    """The revision of `If-Match`, None without one or for `*`; raises 400."""
    header = request.headers.get("if-match")
    if header is None or header.strip() == "*":
        return None
    match = _ETAG.fullmatch(header)
    if match is None:
        raise refuse(
            400,
            "If-Match is not one entity tag of GET /config",
            field="If-Match",
            value=header[:64],
            bound='"REVISION" in double quotes, or *',
        )
    return int(match[1])


def check_query(request: Request, known: Iterable[str] = ()) -> None:
    """Raises 422 for a parameter that the call does not have, or that is given twice."""
    known = tuple(known)
    for name in request.query_params:
        if name not in known:
            bound = ", ".join(known) or "none"
            raise refuse(422, "unknown query parameter", field=name, bound=bound)
        if len(request.query_params.getlist(name)) > 1:
            raise refuse(422, "query parameter given twice", field=name, bound="once")


def query_int(request: Request, name: str, default: int, minimum: int, maximum: int) -> int:
    """A whole number out of the query; raises 422."""
    text = request.query_params.get(name)
    return default if text is None else parse_int(text, name, minimum, maximum)


def query_flag(request: Request, name: str) -> bool:
    """`true` or `false` out of the query, false when left out; raises 422."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise refuse(422, "not a truth value", field=name, value=text[:64], bound="true, false")
    return text == "true"


def trial_terms(request: Request) -> dict[str, Any]:
    """The `TRIAL_PARAMETERS` that the query has, as numbers; raises 422 for what is none.

    Whether they are within their bounds is the engine's to say.
    """
    terms: dict[str, float] = {}
    for name in TRIAL_PARAMETERS:
        text = request.query_params.get(name)
        if text is None:
            continue
        if name.endswith("_ms"):
            if _NUMBER.fullmatch(text) is None:
                raise refuse(422, "not a number", field=name, value=text[:64], bound="as in 40.5")
            terms[name] = float(text)
        else:
            if _INTEGER.fullmatch(text) is None:
                bound = "digits only"
                raise refuse(422, "not a whole number", field=name, value=text[:64], bound=bound)
            terms[name] = int(text)
    return terms


async def read_nothing(request: Request, call: str) -> None:
    """Raises 422 when `call`, which takes no body, has one."""
    if await read_body(request, required=False) not in (b"", b"{}"):
        raise refuse(422, f"{call} takes no body", bound="an empty body")


def parse_int(text: str, name: str, minimum: int, maximum: int) -> int:
    """A whole number within its bounds; raises 422."""
    if _INTEGER.fullmatch(text) is None or not minimum <= int(text) <= maximum:
        raise refuse(
            422,
            "not a whole number within its bounds",
            field=name,
            value=text[:64],
            bound=f"{minimum}..{maximum}",
        )
    return int(text)


def _decode(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise refuse(400, str(error), title="Malformed JSON") from error


def _invalid(error: msgspec.ValidationError, document: Any, kind: type) -> ProblemError:
    """422, with the field and its value out of msgspec's `... - at `$.field``."""
    match = re.search(r"`\$\.(\w+)`|unknown field `(\w+)`", str(error))
    field = (match[1] or match[2]) if match else None
    value = document.get(field) if isinstance(document, dict) and field else None
    known = ", ".join(item.name for item in msgspec.structs.fields(kind))
    detail = str(error).partition(" - at")[0]
    return refuse(422, detail, field=field, value=value, bound=f"fields: {known}")
