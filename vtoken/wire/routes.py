"""The REST interface as data: one row a call, with its query, its body and its answer.

The server's routes, its OpenAPI document and the calls of the Python client are made from these
rows. Paths are below `/vtoken/v1`. A row that names a `command` and reads needs no code of its own
on the server: the engine's answer to that command is the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from vtoken.wire import (
    GUARD_SECONDS,
    AuditPage,
    BlockDetail,
    BlocksDocument,
    Change,
    ConfigDocument,
    Ended,
    EventKind,
    EventPage,
    Fleet,
    Forgotten,
    Guard,
    Operation,
    PatchResult,
    PolicyInfo,
    RequestDetail,
    RequestRow,
    Restored,
    Status,
    TextPage,
    TokenPage,
    commands,
)
from vtoken.wire.request_names import MIN_RANDOM

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
OCTETS = "application/octet-stream"
GZIP = "application/gzip"
CHANGE_HEADER = "X-VToken-Change"
MAX_ID = 2**31 - 1
MAX_SEQ = 2**53 - 1
MAX_EVENTS = 1000  # of a page
MAX_TOKENS = 4096  # of a page
MAX_RECORDED_S = 86_400  # the flight recorder keeps no more
MIN_FPS, MAX_FPS = 0.1, 30.0

Natural = Annotated[int, Meta(ge=0, le=MAX_ID)]
T = TypeVar("T")


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of queries and bodies."""


# ---------------------------------------------------------------- queries


class Query(Model, frozen=True, omit_defaults=True):
    """Base of queries, and that of a call that takes none."""


class OneEngine(Query, frozen=True):
    engine: Annotated[
        Natural | None,
        Meta(description="rank of the engine, see GET /engines; needed if the server has several"),
    ] = None


class AnyEngine(Query, frozen=True):
    engine: Annotated[
        Natural | None,
        Meta(description="rank of the engine, see GET /engines; all are asked without it"),
    ] = None


class AllEngines(Query, frozen=True):
    engine: Annotated[
        Natural | None,
        Meta(description="rank of the engine, see GET /engines; all change without it"),
    ] = None


class TokensQuery(AnyEngine, frozen=True):
    start: Annotated[int, Meta(ge=0, le=MAX_ID, description="first token id")] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_TOKENS, description="most rows")] = 256


class EventsQuery(OneEngine, frozen=True):
    after: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_SEQ)] | None,
        Meta(description="last seq seen: the events after it; the newest ones without it"),
    ] = None
    limit: Annotated[int, Meta(ge=1, le=MAX_EVENTS, description="most events")] = 100
    kind: Annotated[EventKind | None, Meta(description="of this kind only")] = None


class AuditQuery(Query, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_EVENTS, description="most entries")] = 100


class RecordingQuery(OneEngine, frozen=True):
    seconds: Annotated[int, Meta(ge=1, le=MAX_RECORDED_S, description="how far back")] = 300


class StreamQuery(Query, frozen=True):
    topics: Annotated[
        str, Meta(description="comma-separated list of blocks, requests, events, metrics")
    ] = "blocks,requests,events,metrics"
    fps: Annotated[float, Meta(ge=MIN_FPS, le=MAX_FPS, description="most states a second")] = 10.0
    format: Literal["json", "msgpack"] = "json"
    resume: Annotated[
        str | None,
        Meta(
            description="EPOCH:SEQ, with the SEQ of the last event seen; see `resumed` in hello",
        ),
    ] = None
    engine: Annotated[
        Natural | None,
        Meta(description="rank of the engine, see `hello.engines`; default: the server's first"),
    ] = None


ValidateOnly = Annotated[
    bool, Meta(description="dry run: report the effect and change nothing; needs read access only")
]


class ChangeQuery(AllEngines, frozen=True):
    validate_only: ValidateOnly = False


class RestoreQuery(AnyEngine, frozen=True):
    validate_only: ValidateOnly = False


class SyncQuery(Query, frozen=True):
    engine: Annotated[
        Natural | None,
        Meta(
            description="rank of the engine whose configuration all get; without it, the one that "
            "most have"
        ),
    ] = None
    validate_only: ValidateOnly = False


class GuardParameter(Guard, forbid_unknown_fields=True, omit_defaults=True):
    """A guard as a client asks for it; `value` and `count` are ignored."""


class PatchQuery(ChangeQuery, frozen=True):
    """The terms of a trial have the names of `vtoken.wire.commands.PatchConfig`."""

    confirm_within_s: Annotated[
        commands.TrialSeconds | None,
        Meta(description="revert the change unless it is confirmed within this time"),
    ] = None
    guards: Annotated[
        list[GuardParameter],
        Meta(
            description="revert the change if a metric crosses a limit: "
            '[{"metric": "preemptions", "above": 0}]; see docs/changes.md'
        ),
    ] = []
    guard_for_s: Annotated[
        commands.TrialSeconds | None,
        Meta(
            description="how long the guards are active; default confirm_within_s, or "
            f"{GUARD_SECONDS} s without it"
        ),
    ] = None
    canary_engine: Annotated[
        Natural | None,
        Meta(
            description="make the change on this engine first, on trial; the others follow by "
            "themselves when its guards have held, and it is confirmed if confirm_within_s is given"
        ),
    ] = None


# ---------------------------------------------------------------- bodies


class CompactionRequest(Model, frozen=True):
    """Body of `POST /compactions`; every field is optional."""

    request_id: str | None = None  # None: every request
    batch_size: int | None = None  # None: the configured B
    dry_run: bool = False


class ForgetRequest(Model, frozen=True):
    """Body of `POST /requests/{id}/forget`: [start, end) of token ids, prompt and output."""

    spans: Annotated[list[tuple[Natural, Natural]], Meta(min_length=1)]


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True, eq=False)
class Route(Generic[T]):
    """One call. Whoever may read may make it if it reads, or has dry runs and asks for one."""

    name: str  # of the operation, which OpenAPI calls vtoken_NAME
    method: Literal["GET", "PATCH", "POST"]
    path: str  # `{name}` stands for a value, which is quoted
    answer: type[T]
    summary: str
    answered: str = ""  # what a good answer is; empty: what the summary says
    query: type[Query] = Query
    body: type[Any] | None = None  # None: it takes none; dict: a merge patch
    command: type[commands.Call] | None = None  # with the fields of path and query
    running: bool = False  # `request_id` has to mean a request that has not ended
    everywhere: bool = False  # what it asks for is looked for in all engines
    problems: tuple[int, ...] = ()  # statuses that not every call may get
    status: int = 200
    content: tuple[str, ...] = (JSON,)
    description: str = ""

    @property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def changes(self) -> bool:
        """Whether it changes something, or is a dry run of that."""
        return self.method != "GET"

    @property
    def needs_body(self) -> bool:
        """Whether its body may not be empty."""
        if self.body is None or self.body is dict:
            return self.body is dict
        return any(field.required for field in msgspec.structs.fields(self.body))

    @property
    def dry_run(self) -> str:
        """The field of query or body that makes it a dry run; empty without dry runs."""
        if "validate_only" in self.query.__struct_fields__:
            return "validate_only"
        return "dry_run" if "dry_run" in fields_of(self.body) else ""

    @property
    def takes_revision(self) -> bool:
        """Whether it may be made for one revision only (`If-Match`)."""
        return self.changes and "if_match" in fields_of(self.command)


def fields_of(kind: type[Any] | None) -> tuple[str, ...]:
    """The fields of a struct; () for another type."""
    return getattr(kind, "__struct_fields__", ())


REQUEST_ID = (
    "`request_id`, in which `/` is written `%2F`: the engine's id, the id of the answer, the "
    f"client's `X-Request-Id`, or one of these cut behind at least {MIN_RANDOM} random digits, as "
    "its short id is."
)

# fmt: off
# What reads. A path is below /vtoken/v1; `answered` says what the summary does not.
ENGINES = Route("engines", "GET", "/engines", Fleet,
    "Every engine of this server, and whether they agree",
    answered="All engines, also those that do not answer")
STATUS = Route("status", "GET", "/status", Status,
    "The state of the KV cache in one document",
    query=OneEngine, command=commands.Status)
CONFIG = Route("config", "GET", "/config", ConfigDocument,
    "Desired and effective configuration, with the bound of every field",
    query=OneEngine, command=commands.Config)
POLICIES = Route("policies", "GET", "/policies", list[PolicyInfo],
    "Eviction policies, with the JSON schema of their parameters",
    query=AnyEngine, command=commands.Policies)
OPERATION = Route("operation", "GET", "/operations/{id}", Operation,
    "The state of a compaction",
    query=AnyEngine, everywhere=True, problems=(404,))
CHANGE = Route("change", "GET", "/changes/{id}", Change,
    "What became of a change whose answer was lost",
    query=AnyEngine, everywhere=True,
    description="`id` is the one that the problem names, or that the caller sent in the header "
    f"`{CHANGE_HEADER}`. `not_applied`: the engine handled no change of this id and refuses one "
    "that comes later.")
BLOCKS = Route("blocks", "GET", "/blocks", BlocksDocument,
    "Live tokens, flags and owner of every block",
    answered="The pool; the index in a list is the block's id",
    query=OneEngine, command=commands.Blocks, content=(JSON, OCTETS),
    description=f"With `Accept: {OCTETS}`: one byte a block, min(live, 255).")
BLOCK = Route("block", "GET", "/blocks/{id}", BlockDetail,
    "One block, slot by slot",
    query=OneEngine, command=commands.Block, problems=(404,))
REQUESTS = Route("requests", "GET", "/requests", list[RequestRow],
    "Every request that holds or waits for blocks",
    answered="All requests that hold blocks, and the first 64 that wait",
    query=OneEngine, command=commands.Requests)
REQUEST = Route("request", "GET", "/requests/{request_id}", RequestDetail,
    "One request and its block table, or what a finished request kept",
    answered="The request; of finished ones the newest 1,024 are known",
    query=AnyEngine, command=commands.Request, problems=(404, 409), description=REQUEST_ID)
TOKENS = Route("tokens", "GET", "/requests/{request_id}/tokens", TokenPage,
    "The token table of a request, in pages",
    answered="Rows in logical order",
    query=TokensQuery, command=commands.Tokens, running=True,
    problems=(404, 409), description=REQUEST_ID)
TEXT = Route("text", "GET", "/requests/{request_id}/text", TextPage,
    "The text of a request, token by token, with the state of each token",
    answered="Tokens in logical order",
    query=TokensQuery, command=commands.Text, running=True, problems=(404, 409),
    description="The pieces of consecutive tokens concatenate to the text; a character of several "
    "tokens is in the last one's piece. Needs a server started with --vtoken-show-text and the "
    f"right to change things, because prompts may be confidential. {REQUEST_ID}")
EVENTS = Route("events", "GET", "/events", EventPage,
    "The newest events of the engine, or those after one, oldest first",
    answered="Events that the engine still holds",
    query=EventsQuery, command=commands.Events)
AUDIT = Route("audit", "GET", "/audit", AuditPage,
    "The audit log: changes and dry runs with their callers, newest last",
    answered="Accepted calls, and changes that the engine reverted",
    query=AuditQuery)
RECORDING = Route("recording", "GET", "/recording", bytes,
    "The last seconds of the flight recorder",
    answered="A recording of the stream, gzip; `vtoken console --replay` shows it",
    query=RecordingQuery, content=(GZIP,),
    description="A recording has one JSON document a line: a header, then stream messages (1 state "
    "a second, every event) and audit entries. It begins at the key frame before the requested "
    "time. 503 while nothing is recorded, with the reason.")
ASYNCAPI = Route("asyncapi", "GET", "/asyncapi.json", dict[str, Any],
    "The stream `/vtoken/v1/stream`, described in AsyncAPI 3.0")

# What changes something. A dry run of it is reading.
PATCH_CONFIG = Route("patch_config", "PATCH", "/config", PatchResult,
    "Change the configuration atomically, between two steps",
    answered="The change that the engine applied, or would apply",
    query=PatchQuery, body=dict, command=commands.PatchConfig)
CONFIRM = Route("confirm", "POST", "/confirm", PatchResult,
    "Keep the change that is on trial",
    answered="The change stays; the revision is the same",
    query=ChangeQuery, command=commands.Confirm)
UNDO = Route("undo", "POST", "/undo", PatchResult,
    "Restore the previous revision as a new revision",
    answered="The change that the engine applied, or would apply",
    query=ChangeQuery, command=commands.Undo)
SYNC = Route("sync", "POST", "/sync", PatchResult,
    "Give all engines the configuration of one",
    answered="The change that the engines applied, or would apply",
    query=SyncQuery,
    description="Engines that have it already are unchanged; 409 if all have it.")
COMPACT = Route("compact", "POST", "/compactions", Operation,
    "Compact now: overrides the gates, not the safety rules",
    answered="Accepted; follow Location",
    query=AllEngines, body=CompactionRequest, problems=(404,), status=202)
FORGET = Route("forget", "POST", "/requests/{request_id}/forget", Forgotten,
    "Let tokens of a request die before all its others",
    answered="What the request forgets",
    query=AnyEngine, body=ForgetRequest, problems=(404,),
    description="The next tokens that the request loses are those of the spans, oldest first, "
    "whatever its policy ranks. Nothing is evicted by the call itself. Calling again adds spans. "
    + REQUEST_ID)
END = Route("end", "POST", "/requests/{request_id}/end", Ended,
    "End a streaming-input session for its client",
    answered="The session that was ended",
    query=AnyEngine, problems=(404,),
    description="Its blocks are free at once, and its client gets the end of an aborted request. "
    "409 for any other request: it ends by itself. " + REQUEST_ID)
RESTORE = Route("restore", "POST", "/requests/{request_id}/restore", Restored,
    "Bring parked tokens of a request back now",
    answered="What comes back, or would",
    query=RestoreQuery, problems=(404,),
    description="Tokens that gave way and have a copy in host memory become live again in the next "
    "steps, without the wait after a shortage, as far as free memory and the request's budget "
    "allow. " + REQUEST_ID)
# fmt: on

ROUTES: tuple[Route[Any], ...] = tuple(
    row for row in tuple(globals().values()) if isinstance(row, Route)
)
