"""Every REST call: what it takes, and the row of `vtoken.wire.routes` that it is.

A function here makes a `Call`, a plain value. `Client` and `AsyncClient` have it as a method that
sends it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder
from vtoken.client.call import Call
from vtoken.client.methods import sent
from vtoken.wire import routes
from vtoken.wire.routes import CHANGE_HEADER, JSON, MERGE_PATCH, OCTETS, Query, Route

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


def status() -> Call[wire.Status]:
    """The state of the KV cache in one document."""
    return _call(routes.STATUS)


def config() -> Call[wire.ConfigDocument]:
    """Desired and effective configuration, with the bound of every field."""
    return _call(routes.CONFIG)


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
    query = routes.PatchQuery(
        validate_only=validate_only,
        confirm_within_s=confirm_within_s,
        guards=msgspec.convert(guards, list[routes.GuardParameter], from_attributes=True),
        guard_for_s=guard_for_s,
        canary_engine=canary_engine,
    )
    return _call(routes.PATCH_CONFIG, query, body=patch, revision=revision)


def confirm(*, revision: int | None = None, validate_only: bool = False) -> Call[wire.PatchResult]:
    """Keep the change on trial. Refused without one (409), or if `revision` is stale (412)."""
    query = routes.ChangeQuery(validate_only=validate_only)
    return _call(routes.CONFIRM, query, revision=revision)


def undo(*, revision: int | None = None, validate_only: bool = False) -> Call[wire.PatchResult]:
    """Restore the previous revision as a new one; `validate_only`: report what that would do.

    `revision`: refuse (412) unless it is still the newest.
    """
    query = routes.ChangeQuery(validate_only=validate_only)
    return _call(routes.UNDO, query, revision=revision)


def policies() -> Call[list[wire.PolicyInfo]]:
    """Eviction policies, with the JSON schema of their parameters."""
    return _call(routes.POLICIES)


def compact(
    *, request_id: str | None = None, batch_size: int | None = None, dry_run: bool = False
) -> Call[wire.Operation]:
    """Start one compaction round for one request or all; `wait_operation` waits for its end."""
    body = routes.CompactionRequest(request_id=request_id, batch_size=batch_size, dry_run=dry_run)
    return _call(routes.COMPACT, body=body)


def forget(request_id: str, spans: Sequence[tuple[int, int]]) -> Call[wire.Forgotten]:
    """Let tokens of a request die before all its others. `request_id`: as of `request`.

    `spans`: [start, end) of token ids, which count prompt and output from 0. Calls add up.
    """
    body = routes.ForgetRequest(spans=list(spans))
    return _call(routes.FORGET, body=body, request_id=request_id)


def end(request_id: str) -> Call[wire.Ended]:
    """End a streaming-input session for its client. `request_id`: as of `request`."""
    return _call(routes.END, request_id=request_id)


def restore(request_id: str, *, validate_only: bool = False) -> Call[wire.Restored]:
    """Bring parked tokens of a request back now. `request_id`: as of `request`.

    `validate_only`: report what would come back; a read token is enough.
    """
    query = routes.RestoreQuery(validate_only=validate_only)
    return _call(routes.RESTORE, query, request_id=request_id)


def operation(operation_id: str) -> Call[wire.Operation]:
    """The state of a compaction."""
    return _call(routes.OPERATION, id=operation_id)


def change(change_id: str) -> Call[wire.Change]:
    """What became of a change whose answer was lost; `wait_change` waits for the engine."""
    return _call(routes.CHANGE, id=change_id)


def blocks() -> Call[wire.BlocksDocument]:
    """Live tokens and flags of every block, as lists."""
    return _call(routes.BLOCKS)


def block_live() -> Call[npt.NDArray[np.uint8]]:
    """Live tokens of every block, u8[num_blocks], at most 255: a cheaper `blocks`."""
    call: Call[Any] = _call(routes.BLOCKS)
    return replace(call, decode=_octets, headers={"Accept": OCTETS})


def block(block_id: int) -> Call[wire.BlockDetail]:
    """One block: its owners, its slots and why it is pinned."""
    return _call(routes.BLOCK, id=block_id)


def requests() -> Call[list[wire.RequestRow]]:
    """Every request that holds or waits for blocks."""
    return _call(routes.REQUESTS)


def request(request_id: str) -> Call[wire.RequestDetail]:
    """One request and its block table; of the newest 1,024 finished ones, what they kept.

    `request_id`: the engine's id, the id of the answer, the client's `X-Request-Id`, or one of
    these cut behind four random digits. Refused (409) if it means several requests.
    """
    return _call(routes.REQUEST, request_id=request_id)


def tokens(request_id: str, start: int = 0, limit: int = 256) -> Call[wire.TokenPage]:
    """One page of a request's token table, at most 4096 rows; `token_pages` reads all pages."""
    query = routes.TokensQuery(start=start, limit=limit)
    return _call(routes.TOKENS, query, request_id=request_id)


def text(request_id: str, start: int = 0, limit: int = 256) -> Call[wire.TextPage]:
    """One page of a request's text, at most 4096 tokens. Refused (403) if the server does not show
    text or the caller is read-only.
    """
    query = routes.TokensQuery(start=start, limit=limit)
    return _call(routes.TEXT, query, request_id=request_id)


def events(
    after: int | None = None, limit: int = 100, kind: wire.EventKind | None = None
) -> Call[wire.EventPage]:
    """Events after the one numbered `after`, or the newest; at most 1000, oldest first."""
    return _call(routes.EVENTS, routes.EventsQuery(after=after, limit=limit, kind=kind))


def audit(limit: int = 100) -> Call[wire.AuditPage]:
    """The audit log: changes and dry runs with their callers, newest last, at most 1000."""
    return _call(routes.AUDIT, routes.AuditQuery(limit=limit))


def engines() -> Call[wire.Fleet]:
    """Every engine of the server with its status, and whether they agree."""
    return _call(routes.ENGINES)


def sync(*, validate_only: bool = False) -> Call[wire.PatchResult]:
    """Give all engines the configuration of the addressed one, else the one that most have.

    Refused (409) if all have it. `validate_only`: report what that would do.
    """
    return _call(routes.SYNC, routes.SyncQuery(validate_only=validate_only))


def recording(seconds: int = 300) -> Call[bytes]:
    """The flight recorder's last `seconds` as a gzip recording."""
    call = _call(routes.RECORDING, routes.RecordingQuery(seconds=seconds))
    return replace(call, decode=bytes)


class Calls:
    """Every call as a method of both clients, which sends it."""

    status = sent(status)
    config = sent(config)
    patch_config = sent(patch_config)
    confirm = sent(confirm)
    undo = sent(undo)
    policies = sent(policies)
    compact = sent(compact)
    forget = sent(forget)
    end = sent(end)
    restore = sent(restore)
    operation = sent(operation)
    change = sent(change)
    blocks = sent(blocks)
    block_live = sent(block_live)
    block = sent(block)
    requests = sent(requests)
    request = sent(request)
    tokens = sent(tokens)
    text = sent(text)
    events = sent(events)
    audit = sent(audit)
    engines = sent(engines)
    sync = sent(sync)
    recording = sent(recording)


def _call(
    route: Route[T],
    query: Query | None = None,
    *,
    body: Any = None,
    revision: int | None = None,
    **names: str | int,
) -> Call[T]:
    """A call of `route`; `names`: what is in its path. A change gets a new id."""
    headers = {}
    if body is not None:
        headers["Content-Type"] = MERGE_PATCH if route.body is dict else JSON
    if revision is not None:
        headers["If-Match"] = f'"{revision}"'
    params = msgspec.to_builtins(query or Query())
    change_id = None
    if route.changes and not any(getattr(part, route.dry_run, False) for part in (query, body)):
        change_id = headers[CHANGE_HEADER] = uuid.uuid4().hex
    return Call(
        route,
        path=route.path.format(**{name: _quoted(value) for name, value in names.items()}),
        decode=_decoder(route.answer),
        params={name: _text(value) for name, value in params.items()},
        headers=headers,
        content=None if body is None else msgspec.json.encode(body),
        change_id=change_id,
    )


def _quoted(value: str | int) -> str:
    """A part of a path; HTTP libraries resolve the segments `.` and `..`."""
    return quote(str(value), safe="").replace(".", "%2E")


def _text(value: Any) -> str:
    """A query parameter as text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    return Decoder[T](kind).decode


def _octets(content: bytes) -> npt.NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(content, dtype=np.uint8)
