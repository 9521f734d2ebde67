"""What calls answer beside settings and status: changes, blocks, requests, texts, events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from vtoken.base.errors import RefusedError
from vtoken.wire.doc import Doc, OfEngine, PackedArray
from vtoken.wire.settings import (
    ConfigValues,
    EvictionPhase,
    EvictWhen,
    Made,
    PlannerName,
    PolicyChoice,
    Trial,
)
from vtoken.wire.status import Gate, ParkWait, Status

RequestState = Literal[
    "running",
    "waiting",
    "idle",  # a session that waits for its client's next input, and keeps its blocks
    "preempted",
    "finished",
]
OperationState = Literal["pending", "running", "done", "failed", "cancelled"]
ChangeState = Literal["pending", "applied", "refused", "not_applied"]
PatchOutcome = Literal[
    "in_force",  # the engine runs with it
    "accepted",  # desired; no step has run with it yet, `applied_at_step` will be the first
    "unchanged",  # it changes nothing, or confirms a trial: the revision is the same
    "dry_run",  # validate_only: nothing was changed
]
SlotState = Literal["live", "dead", "free"]
MAX_FINISHED = 1024  # finished requests that can be looked up
Pinned = Literal["shared prefix", "hashed", "in flight", "null block", "none"]

# Bits of a block's flags (`u8`, one a block). A block with flags 0 is free.
FLAG_USED = 1  # held by at least one request
FLAG_SHARED = 2  # held by two requests or more (shared prefix)
FLAG_HASHED = 4  # in the prefix cache: never written
FLAG_IN_FLIGHT = 8  # source or destination of a relocation of the newest step
FLAG_TAIL = 16  # the block that its request appends to
FLAG_OTHER = 32  # held by a group that is not managed (`Status.groups`); no other bit is set
FLAG_NULL = 64  # vLLM's null block, id 0: a placeholder without tokens; no other bit is set

EventKind = Literal[
    "relocation",  # data: Relocation
    # data: {"requests": n, "tokens": n, "given": n, "parked": n, "policy": names,
    # "largest": {request: tokens}}: summed over a step; `given` of the tokens died because memory
    # was short, `parked` have a copy in host memory, `largest` has the requests that lost most.
    # With "forgotten": a client named so many tokens of "request_id" that die first
    "eviction",
    "reclaimed",  # data: {"blocks": n, "reason": str}: summed over a step
    # Parked tokens are back. data: {"requests": n, "tokens": n, "blocks": n, "reason": "memory" (it
    # is free) | "asked" | "budget" (there is room in it) | "guard" (it reverted a change) | "swap",
    # "largest": {request: tokens}}: summed over a step
    "restored",
    # Copies were given up while their tokens were parked. data: {"dropped": tokens, "reason": str}
    "parking",
    # data: {"revision", "actor", "changes": {field: [old, new]}, "notes": [str]}, and optionally
    # "overtaken": superseded revision that no step ran with, "trial": Trial that begins, or the
    # fields of a TrialEnd
    "config",
    "deferred",  # data: {"reason": str, "needed_blocks": n, "available_blocks": n}
    # data: {"request_id", "recomputed_tokens": n, "dead_tokens_restored": n, "swapped_tokens": n,
    # "obstacle": str}: swapped ones wait in host memory, and none is computed again; else
    # "obstacle" says why not, as a key of `swaps_refused`; "": nothing is parked
    "preemption",
    "operation",  # data: Operation, at every change of its state; none for dry runs
    "violation",  # data: {"invariant": "I1|I2|I4|...", "detail": str}
    # data: {"detail": "started" | "paused" | "resumed", "scheduling": SchedulingState}, or
    # {"detail": "ended", "request_id", "freed_blocks"}: an operator has ended a session
    "server",
    "canary",  # data: {"reason": str}: a quality check gave no result
    # data: {"call": str, "dropped": n}: the call to the workers may have changed the weights, and
    # the canary does not check so many outputs of before. At most one a step without any
    "weights",
]
# Up to once a step. A store of events keeps all other kinds separately, so that these do not push
# them out.
FREQUENT_KINDS: frozenset[EventKind] = frozenset(
    {"relocation", "eviction", "reclaimed", "restored", "parking", "deferred", "preemption"}
)


class Geometry(Doc):
    num_blocks: int  # ids run 0 .. num_blocks - 1; id 0 is vLLM's null block, not one of the pool
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    bytes_per_token: int  # K and V over all layers and ranks
    num_heads: int | None = None  # query heads over all ranks; None: an older server


class WhatIf(Doc):
    freed_blocks: int
    moved_tokens: int
    moved_bytes: int
    evicted_tokens: int = 0
    deferred_reason: str | None = None
    waiting_tokens: int = 0  # to be evicted once the policy has the scores that it needs
    source_blocks: int = 0
    destination_blocks: int = 0
    gates: list[Gate] = []  # whether an automatic round would run under it
    # Under `evict_when: pressure`, `evicted_tokens` are given for `short_blocks` and 0 without a
    # shortage; running requests can give `givable_tokens` in all until each is at its floor. These
    # three are as in `MemoryPressure`.
    short_blocks: int = 0
    givable_tokens: int = 0
    givable_blocks: int = 0
    # How many more requests of the running ones' mean size fit before one ends, at their peaks.
    # None: no running request evicts, or an older server.
    more_requests: int | None = None
    # How many requests wait for blocks, and how many of them could start one after the other before
    # a running one ends; a started one can give, too, so more may.
    waiting_requests: int = 0
    startable_requests: int = 0
    # Parked tokens that would come back; with a smaller `park_bytes`, those that would be lost.
    restored_tokens: int = 0
    dropped_tokens: int = 0
    # What happens now without the change; None: an older server.
    without_change: WhatIf | None = None


class PatchResult(OfEngine, kw_only=True):
    """A change at the time of the reply; `effective` never shows values that no step ran with."""

    revision: int  # the newest, of `desired`
    applied_at_step: int | None  # the first step that runs with `desired`; None for validate_only
    previous: ConfigValues  # what was desired before
    effective: ConfigValues  # the configuration of the engine's newest step, as in GET /config
    changes: dict[str, list[Any]]  # field -> [old, new] of `desired`; validate_only: would be
    what_if: WhatIf | None = None  # validate_only
    notes: list[str] = []  # e.g. scores that are dropped, values without effect
    trial: Trial | None = None
    desired: ConfigValues | None = None  # after the call; None: an older server
    effective_revision: int = 0  # of `effective`
    outcome: PatchOutcome | None = None
    overtaken: int | None = None  # revision superseded by this one before a step ran with it
    engines: list[PatchResult] = []  # of a change to several engines: each one's own answer


class Relocation(Doc):
    request_id: str
    moved_tokens: int
    moved_bytes: int
    source_blocks: list[int]
    destination_blocks: list[int]
    freed_blocks: int
    reason: str  # "auto", "manual"
    planner: PlannerName
    plan_us: int
    copy_us: int | None = None  # None until the worker has reported
    # Source blocks that other requests held too. Those leave them in the same step, and the blocks
    # freed by all are counted in `freed_blocks` of one of these relocations.
    shared_blocks: int = 0
    # Of `freed_blocks`: the next token takes them again. `reclaimed_blocks` leaves them out.
    retaken_blocks: int = 0


class OperationResult(Doc):
    moved_tokens: int
    moved_bytes: int
    freed_blocks: int
    duration_ms: float


class OperationPlan(Doc):
    requests: int
    source_blocks: int
    destination_blocks: int
    moved_tokens: int
    moved_bytes: int
    freed_blocks: int
    deferred_reason: str | None = None


class Operation(OfEngine, kw_only=True):
    id: str
    state: OperationState
    actor: str
    request_id: str | None
    batch_size: int
    dry_run: bool
    created_ts: float
    plan: OperationPlan | None = None
    result: OperationResult | None = None
    error: str | None = None
    revision: int = 0  # of the configuration when it was requested
    engines: list[Operation] = []  # of a compaction of several engines: each one's own


class Forgotten(OfEngine, kw_only=True):
    """What a request was told to forget. Its live tokens of these spans die before all others."""

    request_id: str
    spans: list[tuple[int, int]]  # [start, end) of token ids, of this call and before, ascending
    new_tokens: int  # of this call, and not forgotten before; 0: it changed nothing
    live_tokens: int  # forgotten tokens that are still live
    revision: int  # of the configuration
    notes: list[str] = []  # e.g. that nothing is evicted


class Ended(OfEngine, kw_only=True):
    """A session that was ended for its client."""

    request_id: str
    freed_blocks: int
    revision: int  # of the configuration
    notes: list[str] = []


class Restored(OfEngine, kw_only=True):
    """What a request gets back of its parked tokens, in the next steps."""

    request_id: str
    parked_tokens: int  # of the request, before
    restorable_tokens: int  # of these, come back now
    blocks: int  # that it takes for them
    waits_for: ParkWait = ""  # why the others do not
    revision: int = 0  # of the configuration
    notes: list[str] = []


class BlocksDocument(OfEngine, kw_only=True):
    block_size: int
    num_blocks: int
    step: int
    live: PackedArray  # u16[num_blocks]
    flags: PackedArray  # u8[num_blocks]
    owner: PackedArray = b""  # u16[num_blocks], see RequestRow.number


class BlockOwner(Doc):
    request_id: str
    live: int
    index: int  # place in the request's block table


class BlockSlot(Doc):
    offset: int
    state: SlotState
    token_id: int | None = None  # of the first owner
    request_id: str | None = None


class BlockDetail(OfEngine, kw_only=True):
    id: int
    live: int
    ref_cnt: int
    flags: int
    pinned: Pinned
    owners: list[BlockOwner]
    slots: list[BlockSlot]  # none of the null block


class RequestRow(Doc):
    """A request. `waiting` and `preempted` ones hold no block and have only their lengths, except
    a session between two turns. `finished` ones hold none either; `live` is what they kept.

    Only the first requests of a long queue have a row; `RequestCounts` counts all.
    """

    id: str
    state: RequestState
    live: int
    dead: int  # evicted tokens of this request, wherever their slots are now
    prompt_tokens: int
    output_tokens: int  # that the client got; the newest one has no K and V, so it is not live
    blocks: int  # blocks held now
    bound_blocks: int  # ceil(live / block_size)
    naive_blocks: int  # blocks that naive-evict would hold
    policy: str
    budget_tokens: int
    dense: bool  # live tokens fill the front of the block table: stock attention path
    moved_tokens: int = 0
    recycled_slots: int = 0
    preemptions: int = 0
    number: int = 0  # 1..65535: stands for the request in the `owner` of its blocks; 0: none
    evict_when: EvictWhen = "always"
    given_tokens: int = 0  # died because memory was short, those included that came back
    givable_tokens: int = 0  # that it can give now, in whole blocks; 0 under "always"
    session: bool = False  # a streaming-input session: evicts nothing, ends with its client
    arrived_ts: float = 0.0  # of a session: its newest turn; 0: an older server
    waiting_since_ts: float | None = None  # of one that waits, since it arrived or was preempted
    waited_s: float = 0.0  # its waits that have ended: for its first blocks, and after preemptions
    # Of one that waits: blocks that must be free for it, withheld ones included. What the prefix
    # cache has of it counts as free for the first in the queue only.
    needed_blocks: int = 0
    restored_tokens: int = 0  # that came back, those included that gave way again
    parked_tokens: int = 0  # of the dead ones: have a copy in host memory, and can come back


class RequestDetail(RequestRow):
    engine: int | None = None  # that has it, as in `OfEngine`
    block_table: list[int] = []
    block_live: list[int] = []  # live tokens of this request, a block of block_table
    # [start, end) of token ids that are never evicted, ascending; they count against the budget.
    protected: list[tuple[int, int]] = []
    # Parts of the prompt, named as in the setting `protect`, that do not fit the budget and are
    # protected partly or not at all.
    protection_cut: list[str] = []
    ended_ts: float | None = None  # of a finished request; the newest 1,024 can be looked up
    # [start, end) of token ids that die before all others, ascending; protected ones do not die.
    forgotten: list[tuple[int, int]] = []
    # The request's own budget where its policy and its protected tokens need more.
    asked_budget_tokens: int | None = None
    evict_during: EvictionPhase = "decode"  # "decode" also if its prompt's logprobs are asked for


class TokenRow(Doc):
    token_id: int  # logical id
    position: int  # RoPE position; equal to the logical id
    block: int | None  # None if dead and its slot was returned or recycled
    offset: int | None
    live: bool
    score: float | None = None  # of the policy's signal, if it has one
    protected: bool = False  # never evicted
    forgotten: bool = False  # dies first
    parked: bool = False  # dead, with a copy in host memory: it can come back


class TokenPage(OfEngine, kw_only=True):
    request_id: str
    step: int
    start: int
    total: int
    rows: list[TokenRow]


class TextToken(Doc):
    """A token as a piece of its request's text. The pieces of all tokens, in order, are the text.

    A character that spans several tokens is in the piece of the last; a piece never changes.
    """

    token_id: int  # logical id
    position: int
    text: str | None  # None: the prompt was given as embeddings and has no text
    live: bool
    protected: bool = False  # in a protected span of its request: never evicted
    score: float | None = None  # as in TokenRow
    shadow_live: bool | None = None  # see TextShadow; None: not compared
    forgotten: bool = False  # dies first
    parked: bool = False  # as in TokenRow


class TextShadow(Doc):
    """The shadow policy's choice at the request's newest eviction.

    It covers the tokens that were live then; tokens that died before or came later are not
    compared.
    """

    policy: PolicyChoice
    step: int  # of the eviction
    num_tokens: int  # tokens of the request then, dead ones included
    evicted: int  # tokens evicted; the shadow would have evicted as many
    agreed: int  # tokens in both choices


class TextPage(OfEngine, kw_only=True):
    request_id: str
    step: int
    start: int
    total: int  # tokens whose text is known; the newest may have none yet
    rows: list[TextToken]
    prompt_tokens: int = 0
    shadow: TextShadow | None = None  # None: no shadow, or none was compared at that eviction


class Event(Doc):
    seq: int  # counts the events of an epoch from 1, without gaps
    ts: float
    step: int
    kind: EventKind
    summary: str  # one line for people
    data: dict[str, Any] = {}


class TrialEnd(Doc, omit_defaults=True):
    """How a trial ended, in the data of its event.

    One of `reverted`, `kept` and `confirmed` is the revision that was on trial.
    """

    actor: str  # "trial" (not confirmed in time), "guard", or who confirmed it
    revision: int = 0  # the newest then
    reverted: int | None = None
    kept: int | None = None  # its guards did not revert it
    confirmed: int | None = None
    reason: str = ""  # of a reverted or kept one, with value and limit
    unevaluated: list[str] | None = None  # of a kept one: guards that never had a value
    engines: list[int] = []  # of a reverted one: engines that tried it together
    followers: list[int] = []  # of another: engines that make the change now
    patch: dict[str, Any] = {}  # which they make

    @staticmethod
    def of(event: Event) -> TrialEnd | None:
        """The end that an event tells; None if no trial ended."""
        ends = not event.data.keys().isdisjoint(("reverted", "kept", "confirmed"))
        return msgspec.convert(event.data, TrialEnd) if ends and event.kind == "config" else None


class EventPage(OfEngine, kw_only=True):
    events: list[Event]
    first_seq: int  # oldest event still held
    last_seq: int


class AuditEntry(Doc):
    ts: float
    actor: str
    action: str
    changes: dict[str, list[Any]]
    revision: int
    dry_run: bool
    epoch: str = ""  # with `event_seq`: the engine's epoch
    event_seq: int | None = None  # `seq` of the event of an automatic action of the engine
    engine: int | None = None  # None: all engines of the server, or an older server
    change: str = ""  # id of the call, see the header X-VToken-Change; "": a dry run or no call


class AuditPage(Doc):
    entries: list[AuditEntry]  # oldest first
    dropped: int = 0  # entries that were lost while they could not be written
    storage_error: str = ""  # why the newest entries are in memory only


class Problem(Doc):
    """RFC 9457 problem document."""

    status: int
    title: str
    detail: str
    type: str = "about:blank"
    field: str | None = None
    value: Any = None
    bound: str | None = None
    change: str | None = None  # the outcome of this change is unknown; GET /changes/{id} tells it

    @staticmethod
    def of(error: RefusedError) -> Problem:
        """The document of refused input."""
        return Problem(
            status=error.status,
            title=error.title,
            detail=error.detail,
            field=error.field,
            value=error.value,
            bound=error.bound,
        )


class Change(Doc):
    """What became of a call that changes something."""

    id: str  # of the call, see the header X-VToken-Change
    state: ChangeState  # not_applied: none of the newest 1,000, and refused if it comes later
    result: PatchResult | None = None  # applied: the answer to a change of the configuration
    operation: Operation | None = None  # applied: the compaction as it was accepted
    forgotten: Forgotten | None = None  # applied: the answer to a call that forgets tokens
    ended: Ended | None = None  # applied: the answer to a call that ends a session
    restored: Restored | None = None  # applied: the answer to a call that restores tokens
    problem: Problem | None = None  # refused: nothing was changed
    # On a server with several engines: each one's own outcome. `state` is then "applied" if one of
    # them applied the change.
    engines: list[Change] = []


class EngineRow(Doc):
    """One engine of a server."""

    engine: int
    status: Status | None  # now, or the newest known of an engine that does not answer
    revision: int = 0
    # field -> [here, in most engines] of the desired configuration; {}: as most have it. If as many
    # have another one, field -> [here, there] on both sides.
    drift: dict[str, list[Any]] = {}
    problem: str = ""  # why it does not answer
    silent_s: float = 0.0  # of one that does not answer: the age of `status` [s]
    made: Made | None = None  # the change that made `revision`


class Fleet(Doc):
    """The engines of one server."""

    revision: int  # the newest of any engine
    engines: list[EngineRow]
    sentence: str  # what is wrong with the fleet as a whole, or that nothing is
    ok: bool  # all answer and run one configuration
