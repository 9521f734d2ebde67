"""Definitions of all REST calls: method, path, input and type of the answer.

A function here makes a `Call`, a plain value. `Client` and `AsyncClient` have a method of the same
name that sends it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import structs

from vtoken import wire
from vtoken.base.documents import Decoder
from vtoken.client.server import Server

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

JSON = "application/json"
OCTETS = "application/octet-stream"
CHANGE_HEADER = "X-VToken-Change"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call; `decode` turns the body of a successful response into the answer."""

    method: str
    path: str  # below /vtoken/v1
    decode: Callable[[bytes], T]
    params: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes | None = None
    change_id: str | None = None  # names a call that changes something, see `change`
    changes: bool = False  # something, or is a dry run of that
    of_server: bool = False  # about the server, whatever engine is addressed

    def query(self, server: Server) -> dict[str, str]:
        """The query at `server`."""
        return self.params if self.of_server else server.query(changes=self.changes) | self.params


def status() -> Call[wire.Status]:
    """The state of the KV cache in one document."""
    return _get(wire.Status, "/status")


def config() -> Call[wire.ConfigDocument]:
    """Desired and effective configuration, with the bound of every field."""
    return _get(wire.ConfigDocument, "/config")


def patch_config(
    patch: dict[str, Any],
    *,
    revision: int | None = None,
    validate_only: bool = False,
    confirm_within_s: int | None = None,
    guards: Sequence[wire.Guard] = (),
    guard_for_s: int | None = None,
    canary_engine: int | None = None,
) -> Call[wire.PatchResult]:
    """Merge-patch the configuration atomically, between two engine steps.

    `revision`: refuse (412) unless it is still the newest. `validate_only`: report the effect and
    change nothing; a read token is enough. `confirm_within_s` puts the change on trial: the engine
    reverts it unless `confirm` arrives in time. `guards`: the engine also reverts it if one of
    these metrics crosses its limit within `guard_for_s` seconds. `canary_engine`: the engine that
    tries the change first; the others follow when its guards have held.
    """
    params = _params(
        validate_only="true" if validate_only else None,
        confirm_within_s=confirm_within_s,
        guards=_guards(guards),
        guard_for_s=guard_for_s,
        canary_engine=canary_engine,
    )
    headers = {"Content-Type": "application/merge-patch+json"} | _if_match(revision)
    content = msgspec.json.encode(patch)
    call = Call("PATCH", "/config", _json(wire.PatchResult), params, headers, content, changes=True)
    return call if validate_only else _named(call)


def _guards(guards: Sequence[wire.Guard]) -> str | None:
    """Guards as a query parameter, without the fields that are not given."""
    given = [
        {name: value for name, value in structs.asdict(guard).items() if value is not None}
        for guard in guards
    ]
    return msgspec.json.encode(given).decode() if given else None


def confirm(*, revision: int | None = None, validate_only: bool = False) -> Call[wire.PatchResult]:
    """Keep the change on trial. Refused without one (409), or if `revision` is stale (412)."""
    return _settle("/confirm", revision, validate_only)


def undo(*, revision: int | None = None, validate_only: bool = False) -> Call[wire.PatchResult]:
    """Restore the previous revision as a new one; `validate_only`: report what that would do.

    `revision`: refuse (412) unless it is still the newest.
    """
    return _settle("/undo", revision, validate_only)


def policies() -> Call[list[wire.PolicyInfo]]:
    """Eviction policies, with the JSON schema of their parameters."""
    return _get(list[wire.PolicyInfo], "/policies")


def compact(
    *, request_id: str | None = None, batch_size: int | None = None, dry_run: bool = False
) -> Call[wire.Operation]:
    """Start one compaction round for one request or all; `wait_operation` waits for its end."""
    body: dict[str, Any] = {"dry_run": dry_run}
    if request_id is not None:
        body["request_id"] = request_id
    if batch_size is not None:
        body["batch_size"] = batch_size
    headers = {"Content-Type": JSON}
    content = msgspec.json.encode(body)
    call = Call("POST", "/compactions", _json(wire.Operation), {}, headers, content, changes=True)
    return call if dry_run else _named(call)


def forget(request_id: str, spans: Sequence[tuple[int, int]]) -> Call[wire.Forgotten]:
    """Let tokens of a request die before all its others. `request_id`: as of `request`.

    `spans`: [start, end) of token ids, which count prompt and output from 0. Calls add up.
    """
    path = f"{_request(request_id)}/forget"
    content = msgspec.json.encode({"spans": spans})
    headers = {"Content-Type": JSON}
    return _named(Call("POST", path, _json(wire.Forgotten), {}, headers, content, changes=True))


def end(request_id: str) -> Call[wire.Ended]:
    """End a streaming-input session for its client. `request_id`: as of `request`."""
    return _named(Call("POST", f"{_request(request_id)}/end", _json(wire.Ended), changes=True))


def operation(operation_id: str) -> Call[wire.Operation]:
    """The state of a compaction."""
    return replace(
        _get(wire.Operation, f"/operations/{quote(operation_id, safe='')}"), of_server=True
    )


def change(change_id: str) -> Call[wire.Change]:
    """What became of a change whose answer was lost; `wait_change` waits for the engine."""
    return replace(_get(wire.Change, f"/changes/{quote(change_id, safe='')}"), of_server=True)


def blocks() -> Call[wire.BlocksDocument]:
    """Live tokens and flags of every block, as lists."""
    return _get(wire.BlocksDocument, "/blocks")


def block_live() -> Call[npt.NDArray[np.uint8]]:
    """Live tokens of every block, u8[num_blocks], at most 255: a cheaper `blocks`."""
    return Call("GET", "/blocks", _octets, headers={"Accept": OCTETS})


def block(block_id: int) -> Call[wire.BlockDetail]:
    """One block: its owners, its slots and why it is pinned."""
    return _get(wire.BlockDetail, f"/blocks/{block_id}")


def requests() -> Call[list[wire.RequestRow]]:
    """Every request that holds or waits for blocks."""
    return _get(list[wire.RequestRow], "/requests")


def request(request_id: str) -> Call[wire.RequestDetail]:
    """One request and its block table; of the newest 1,024 finished ones, what they kept.

    `request_id`: the engine's id, the id of the answer, the client's `X-Request-Id`, or one of
    these cut behind four random digits. Refused (409) if it means several requests.
    """
    return _get(wire.RequestDetail, _request(request_id))


def tokens(request_id: str, start: int = 0, limit: int = 256) -> Call[wire.TokenPage]:
    """One page of a request's token table, at most 4096 rows; `token_pages` yields all pages."""
    return _get(wire.TokenPage, f"{_request(request_id)}/tokens", start=start, limit=limit)


def text(request_id: str, start: int = 0, limit: int = 256) -> Call[wire.TextPage]:
    """One page of a request's text, at most 4096 tokens. Refused (403) if the server does not show
    text or the caller is read-only.
    """
    return _get(wire.TextPage, f"{_request(request_id)}/text", start=start, limit=limit)


def events(
    after: int | None = None, limit: int = 100, kind: wire.EventKind | None = None
) -> Call[wire.EventPage]:
    """Events after the one numbered `after`, or the newest; at most 1000, oldest first."""
    return _get(wire.EventPage, "/events", after=after, limit=limit, kind=kind)


def audit(limit: int = 100) -> Call[wire.AuditPage]:
    """The audit log: changes and dry runs with their callers, newest last, at most 1000."""
    return replace(_get(wire.AuditPage, "/audit", limit=limit), of_server=True)


def engines() -> Call[wire.Fleet]:
    """Every engine of the server with its status, and whether they agree."""
    return replace(_get(wire.Fleet, "/engines"), of_server=True)


def sync(*, validate_only: bool = False) -> Call[wire.PatchResult]:
    """Give all engines the configuration of the addressed one, else the one that most have.

    Refused (409) if all have it. `validate_only`: report what that would do.
    """
    params = _params(validate_only="true" if validate_only else None)
    call = Call("POST", "/sync", _json(wire.PatchResult), params, changes=True)
    return call if validate_only else _named(call)


def recording(seconds: int | None = None) -> Call[bytes]:
    """The flight recorder's last `seconds` (None: the server's default) as a gzip recording."""
    return Call("GET", "/recording", bytes, _params(seconds=seconds), {"Accept": "*/*"})


def _request(request_id: str) -> str:
    """The path of a request; HTTP libraries resolve the segments `.` and `..`."""
    return "/requests/" + quote(request_id, safe="").replace(".", "%2E")


def _get(kind: type[T], path: str, /, **params: float | str | None) -> Call[T]:
    return Call("GET", path, _json(kind), _params(**params))


def _settle(path: str, revision: int | None, validate_only: bool) -> Call[wire.PatchResult]:
    params = _params(validate_only="true" if validate_only else None)
    call = Call("POST", path, _json(wire.PatchResult), params, _if_match(revision), changes=True)
    return call if validate_only else _named(call)


def _named(call: Call[T]) -> Call[T]:
    """`call` under a new id."""
    change_id = uuid.uuid4().hex
    return replace(call, headers=call.headers | {CHANGE_HEADER: change_id}, change_id=change_id)


def _if_match(revision: int | None) -> dict[str, str]:
    return {} if revision is None else {"If-Match": f'"{revision}"'}


def _json(kind: type[T]) -> Callable[[bytes], T]:
    return Decoder[T](kind).decode


def _octets(content: bytes) -> npt.NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(content, dtype=np.uint8)


def _params(**params: float | str | None) -> dict[str, str]:
    """Query parameters as text; None leaves one out."""
    return {
        name: f"{value:.15g}" if isinstance(value, float) else str(value)
        for name, value in params.items()
        if value is not None
    }
