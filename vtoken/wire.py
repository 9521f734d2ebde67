"""The wire format: every document and stream message that leaves the engine, as msgspec structs.

The engine fills these structs, the API forwards them, the console and the CLI read them. Within
schema 1 fields may be added, never renamed or removed. Units are suffixes:
`_tokens _blocks _slots _bytes _ms _us _ratio`; times are Unix seconds.

Arrays are packed: little-endian bytes in msgpack, a list of integers in JSON (`pack_array`,
`unpack_array`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1
MAX_TOKENS = 1 << 24

PackedArray = bytes | list[int]

# Bits of a block's flags (`u8`, one a block). A block with flags 0 is free.
FLAG_USED = 1  # held by at least one request
FLAG_SHARED = 2  # held by two requests or more (shared prefix)
FLAG_HASHED = 4  # in the prefix cache: never written
FLAG_IN_FLIGHT = 8  # source or destination of a relocation of the newest step
FLAG_TAIL = 16  # the block that its request appends to

Cause = Literal["ok", "fragmented", "full"]
ReclamationMode = Literal["auto", "paused", "off"]
PlannerName = Literal["plug", "pack"]
RoundRule = Literal["price", "paper"]
EvictionPhase = Literal["decode", "prefill", "both"]
EvictWhen = Literal["pressure", "always"]
AdmissionRule = Literal["compressed", "stock"]
PrefixSharing = Literal["skip", "index", "copy"]
RequestState = Literal["running", "waiting", "preempted", "finished"]
SchedulingState = Literal[
    "running",
    "paused_new",  # vLLM starts no new request
    "paused",  # vLLM schedules nothing
]
OperationState = Literal["pending", "running", "done", "failed", "cancelled"]
ChangeState = Literal["pending", "applied", "refused", "not_applied"]
PatchOutcome = Literal[
    "in_force",  # the engine runs with it
    "accepted",  # desired; no step has run with it yet, `applied_at_step` will be the first
    "unchanged",  # it changes nothing, or confirms a trial: the revision is the same
    "dry_run",  # validate_only: nothing was changed
]
CalibrationSource = Literal[
    "configured",  # `probe.layers`
    "profile",
    "default depth",  # the profile has no layer for this signal, or there is no profile
]
HealthPart = Literal["engine", "frames", "audit", "recorder"]
SlotState = Literal["live", "dead", "free"]
Pinned = Literal["shared prefix", "hashed", "in flight", "none"]
EventKind = Literal[
    "relocation",  # data: Relocation
    # data: {"requests": n, "tokens": n, "given": n, "policy": name}: summed over a step; `given`
    # of the tokens died because memory was short. With "forgotten": a client named so many tokens
    # of "request_id" that die first
    "eviction",
    "reclaimed",  # data: {"blocks": n, "reason": str}: summed over a step
    # data: {"revision", "actor", "changes": {field: [old, new]}, "notes": [str]}, and optionally
    # "overtaken": superseded revision that no step ran with, "trial": Trial that begins,
    # "reverted": revision that actor "trial" or "guard" took back, "kept": revision whose guard
    # did not revert it, "reason": why it was reverted or kept, with value and limit,
    # "unevaluated": limits of that guard which never had a value, "confirmed": revision
    "config",
    "deferred",  # data: {"reason": str, "needed_blocks": n, "available_blocks": n}
    "preemption",  # data: {"request_id", "dead_tokens_restored": n}
    "operation",  # data: Operation, at every change of its state; none for dry runs
    "violation",  # data: {"invariant": "I1|I2|I4|...", "detail": str}
    "server",  # data: {"detail": "started" | "paused" | "resumed", "scheduling": SchedulingState}
    "canary",  # data: {"reason": str}: a quality check gave no result
]
# Up to once a step. A store of events keeps all other kinds separately, so that these do not push
# them out.
FREQUENT_KINDS: frozenset[EventKind] = frozenset(
    {"relocation", "eviction", "reclaimed", "deferred", "preemption"}
)


class Doc(msgspec.Struct, omit_defaults=False, kw_only=True):
    """Base of every wire document. Readers ignore unknown fields, so old readers keep working."""


# ---------------------------------------------------------------- documents


class BlockCounts(Doc):
    total: int  # usable blocks of the pool, without the null block
    free: int
    used: int
    partially_live: int  # used, 0 < live < block_size
    low_utilization: int  # used, live <= block_size / 2
    shared: int  # held by two requests or more
    headroom: int  # fresh blocks that one planning round may take
    withheld: int = 0  # of `free`: vLLM's --watermark keeps them from waiting requests


class TokenCounts(Doc):
    live: int  # live slots in used blocks; a shared slot counts once
    dead: int  # evicted tokens that still occupy a slot of a used block, summed over requests
    evicted: int = 0  # cumulative
    generated: int = 0  # cumulative sampled tokens; tokens per second is its derivative


class Gate(Doc):
    """The current state of one condition of an automatic planning round."""

    # "reclamation", "theta_f", "watermark", "low_utilization", "pause", "price", "headroom"
    name: str
    open: bool
    detail: str  # both numbers: "F 0.31 > theta_F 0.25"


class Percentiles(Doc):
    """Percentiles over a window; None if nothing was measured in it."""

    count: int
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None


class Latency(Doc):
    """Latencies measured by the engine over the last `window_s` seconds."""

    window_s: float
    ttft: Percentiles  # arrival to first token
    inter_token: Percentiles  # between two tokens of one request


class Fragmentation(Doc):
    f: float  # intra-block waste ratio, 0..1 (paper 2.3.1)
    theta_f: float
    cause: Cause
    sentence: str = ""  # one line in plain words, from the planner's own numbers
    reclaimable_blocks: int = 0  # at least so many would one compaction (within B) free now
    reclaim_moved_tokens: int = 0  # that it would move
    reclaim_moved_bytes: int = 0
    low_watermark_blocks: int = 0
    gates: list[Gate] = []


class ReclamationCounters(Doc):
    """What reclamation has done since the engine started; the runtime counts in these fields."""

    relocations: int = 0
    moved_tokens: int = 0
    reclaimed_blocks: int = 0
    recycled_slots: int = 0
    deferred: int = 0  # rounds that found work but no headroom
    copy_us: int = 0  # time in copies
    plan_us: int = 0  # time in planning
    # Shared prefix blocks; a block counts once for each request that held it.
    shared_skipped_blocks: int = 0  # had a hole and were skipped by a planning round
    shared_released_blocks: int = 0  # all-dead, released while other requests held them
    shared_copied_blocks: int = 0  # emptied by copying
    shared_copied_tokens: int = 0
    shared_freed_blocks: int = 0  # of the copied blocks, each counted once: now free
    # Wasted moves.
    relocation_freed_blocks: int = 0  # of `reclaimed_blocks`: freed by relocation and not retaken
    moved_then_evicted_tokens: int = 0  # evicted within `payback_steps` steps after a move
    # Steps in which an automatic round with a possible gain did not run, by reason. The first
    # closed gate counts while some request with holes holds more blocks than
    # ceil((live + 1) / S), the need of its live tokens and the next one. "headroom": a round ran
    # and lacked fresh blocks for a plan. "in_flight": a round found nothing because relocations of
    # requests with excess blocks are not reported yet. Steps that run operations do not count.
    deferrals: dict[str, int] = {}
    # The CPU worker packs the live tokens of partial blocks before attention reads them.
    packed_tokens: int = 0  # counted once a step, not once a layer
    pack_us: int = 0


class Reclamation(ReclamationCounters, kw_only=True):
    state: ReclamationMode
    in_flight: int  # moved tokens of the newest step whose copy has not been reported yet
    moved_bytes: int  # of the moved tokens
    # Sums over requests, so that the three are comparable; a shared block counts once a holder.
    held_blocks: int = 0
    blocks_without_reclaim: int = 0  # what the same requests would hold under naive-evict
    packed_bound_blocks: int = 0  # sum of ceil(live / block_size)
    payback_steps: int = 0


class Price(Doc):
    """The cost of one token or one request in µs; a prior until the first sample."""

    us: float
    per: Literal["token", "request"]
    source: Literal["measured", "prior"]
    samples: int  # measured steps or rounds so far


class RoundPrices(Doc):
    """The prices of holes, of moves and of probes on this machine, and the worth of a round now."""

    hole: Price  # packing one token of a partial block, for one step of attention over all layers
    copy: Price  # moving one token
    plan: Price  # planning one request of a round
    probe: Price | None = None  # one request's decode query; None: an older server
    saving_us: float = 0.0  # of a round now: packing until its holes would close, or more come
    cost_us: float = 0.0  # of a round now: its copies and its plan
    loose_tokens: int = 0  # tokens of partial blocks that the next step would not pack
    moved_tokens: int = 0  # estimate of the tokens that it would copy
    requests: int = 0  # requests whose tokens it would move


class RequestCounts(Doc):
    running: int
    waiting: int
    preempted: int  # cumulative preemptions
    finished: int = 0  # cumulative


class Invariants(Doc):
    checked: int  # commits checked
    violations: int
    verified_relocations: int = 0  # contents hashed before and after, cumulative
    verify_us: int = 0  # time in that, cumulative
    strict: bool = True  # a violation stops the engine; fixed at start-up
    check_every_step: bool = False  # every step recomputes all tables; fixed at start-up


class PolicyChoice(Doc):
    name: str
    params: dict[str, Any] = {}


class Shadow(Doc):
    """Agreement with the shadow policy, whose choices are counted and never applied.

    Counts begin when the shadow is configured.
    """

    policy: PolicyChoice
    compared: int = 0  # evictions where both policies chose victims
    victims: int = 0  # tokens that died in them
    agreed: int = 0  # of these, the shadow would have evicted too
    waiting: int = 0  # evictions for which the shadow had no scores yet
    error: str | None = None  # the shadow failed and is not called any more


class Calibration(Doc):
    """The layers and heads of the current policy's signal, and the profile of this model."""

    source: CalibrationSource
    signal: str | None = None  # its kind; None: the current policy has no signal
    layers: list[int] = []
    heads: list[int] = []  # query heads, of each of the layers; []: all
    detail: str = ""  # why no profile is loaded; "" while one is
    # Of the loaded profile, empty without one.
    file: str = ""
    fingerprint: str = ""
    model: str = ""  # the argument of `vtoken calibrate`
    created_ts: float | None = None


class CanaryFigures(Doc):
    """Generated tokens compared with the full cache, over the newest checked requests of a group.

    Means are over tokens; those of log-probabilities are in nats. `…_se`: standard error of the
    mean with requests as independent samples; None for fewer than two. Without a sample a mean is
    None.
    """

    count: int = 0  # requests
    tokens: int = 0
    greedy_count: int = 0  # of `count`: sampled greedily, so that `agreement` is defined
    agreement: float | None = None  # share of greedy tokens that the full cache ranks first
    agreement_se: float | None = None
    # Log-probability of a token as the request sampled it, minus that under the full cache.
    logprob_lost: float | None = None
    logprob_lost_se: float | None = None
    logprob: float | None = None  # under the full cache; near 0 for a run that loops


class CanaryGroup(CanaryFigures):
    """Requests with evictions by one policy under one revision."""

    policy: str = ""
    revision: int = 0


class CanaryStatus(CanaryFigures):
    """The quality canary: requests with evictions, all policies and revisions of the window."""

    window: int = 0  # most requests that the figures rest on
    control: CanaryFigures = msgspec.field(default_factory=CanaryFigures)  # without evictions
    groups: list[CanaryGroup] = []  # of `count`, newest revision first
    # Cumulative, control group included.
    checked: int = 0
    dropped: int = 0  # sampled, then dropped for lack of space or time
    failed: int = 0  # a check ended without a result; an event has the reason
    skipped: dict[str, int] = {}  # sampled, but cannot be checked: reason -> requests


class Health(Doc):
    """A part of the server that must work before an incident, so that it can be investigated."""

    name: HealthPart
    ok: bool
    detail: str  # a sentence with the reason or the age
    since_ts: float | None = None  # since when it is not ok, if known


class MemoryPressure(Doc):
    """Who needs blocks, and who gives tokens for them: requests under `evict_when: pressure`."""

    near: bool  # requests may have to give soon, so their signals are computed
    short_blocks: int  # that are needed, the headroom included, and not free
    growth_blocks: int  # that running requests take within the next steps
    asked_blocks: int  # that must be free for the first waiting request; others give for it
    givers: int  # running requests that can give
    givable_tokens: int  # that they can give in whole blocks, until each is at its floor
    givable_blocks: int
    given_tokens: int  # since the engine started
    recent_tokens: int  # given in the last `window_s` seconds
    recent_givers: int  # by this many requests
    window_s: float
    spared_tokens: int  # live, but dead by now under `evict_when: always`
    preemptions_above_floor: int  # while somebody could have given a block
    # Finished requests by the live share of their tokens at their end: upper bound -> how many have
    # at most this share, and more than the bound before.
    kept_shares: dict[str, int] = {}
    kept_share_sum: float = 0.0


class Status(Doc):
    schema: int
    vtoken_version: str
    vllm_version: str
    model: str
    device: str  # "cpu", "cuda"
    epoch: str  # changes when the engine restarts
    step: int
    ts: float
    block_size: int
    blocks: BlockCounts
    tokens: TokenCounts
    fragmentation: Fragmentation
    reclamation: Reclamation
    policy: PolicyChoice
    budget_tokens: int  # per request, while `budget_ratio` is 0
    interval_tokens: int
    requests: RequestCounts
    invariants: Invariants
    config_revision: int
    step_ms: float = 0.0  # exponential mean of the time between two steps while busy
    latency: Latency | None = None
    shadow: Shadow | None = None
    scheduling: SchedulingState = "running"
    paused_since_ts: float | None = None  # of `scheduling`; None while it is "running"
    prices: RoundPrices | None = None  # None: an older server
    calibration: Calibration | None = None  # None: an older server
    health: list[Health] = []  # filled in by the API process that answers
    budget_ratio: float = 0.0  # above 0: a request's budget is this share of its prompt
    budget_floor_tokens: int = 0  # the least budget under `budget_ratio`
    canary: CanaryStatus | None = None  # None: off since the engine started
    pressure: MemoryPressure | None = None  # None: no request gives, now or if one came
    guards: list[Guard] = []  # of the change on trial, with their values now


class Geometry(Doc):
    num_blocks: int  # ids run 0 .. num_blocks - 1; id 0 is vLLM's null block, always free here
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    bytes_per_token: int  # K and V over all layers and ranks
    num_heads: int | None = None  # query heads over all ranks; None: an older server


class Recall(Doc):
    """Share of needles whose tokens all rank among the best `keep` share of a prompt's tokens.

    Measured on this model by `vtoken calibrate`, over `samples` prompts with one needle each.
    """

    keep: float
    recall: float
    samples: int


class PolicyInfo(Doc):
    name: str
    summary: str
    source: str  # arXiv id or "-"
    needs: list[str]  # of "attention", "keys", "token_ids"
    params_schema: dict[str, Any]  # JSON schema of `policy.params`
    error: str | None = None  # why this policy of another package cannot be loaded
    quality: list[Recall] = []  # with its default parameters; []: not measured


BudgetTokens = Annotated[
    int, Meta(ge=1, le=MAX_TOKENS, description="live tokens that a request may keep")
]
IntervalTokens = Annotated[
    int,
    Meta(ge=0, le=MAX_TOKENS, description="evict when live exceeds the budget by more than this"),
]
BudgetRatio = Annotated[
    float,
    Meta(ge=0.0, le=1.0, description="live tokens, as a share of the prompt; 0: budget_tokens"),
]
VerifyRatio = Annotated[
    float, Meta(ge=0.0, le=1.0, description="share of relocations verified by content hash")
]
P = TypeVar("P")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The queries, layers and heads that scores are computed from."""

    layers: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(description="[]: the profile's, else one at 0.7 of the depth (key norms: 0.6)"),
    ] = []
    heads: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(description="query heads, the same in each layer; []: the profile's, else all"),
    ] = []
    every_steps: Annotated[int, Meta(ge=1, le=1024, description="probe every k-th step")] = 1


class Protect(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a chat prompt that are never evicted, in the order in which they are protected."""

    template: Annotated[
        bool, Meta(description="the chat template's first tokens, and the answer's role header")
    ] = True
    system: Annotated[bool, Meta(description="the system prompt")] = True
    last_user: Annotated[bool, Meta(description="the last user turn")] = False


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """Which finished requests are checked against the full cache."""

    share: Annotated[
        float,
        Meta(ge=0.0, le=1.0, description="share of requests that evicted to check; 0: off"),
    ] = 0.0
    control_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="share of requests that evicted nothing to check, while canary.share > 0",
        ),
    ] = 0.05


class Configuration(msgspec.Struct, Generic[P], frozen=True, kw_only=True):
    """The settings that operators may change live: names, types, bounds, defaults, meaning.

    Flags, bounds, the console's form and docs/settings.md are generated from this struct. `P` is
    the type of a policy: name and parameters on the wire, a `Policy` in the engine. Bounds and
    defaults that depend on the pool are in `pool_limits`.
    """

    policy: Annotated[P, Meta(description="{name, params}; parameters: GET /vtoken/v1/policies")]
    theta_f: Annotated[float, Meta(ge=0.0, le=1.0, description="reclaim when F exceeds this")] = (
        0.25  # paper 3.3
    )
    batch_size: Annotated[int, Meta(ge=1, description="B: most source blocks in one round")] = 32
    low_watermark_blocks: Annotated[
        int, Meta(ge=0, description="reclaim only when this few blocks or fewer are free")
    ] = 0
    headroom_blocks: Annotated[
        int, Meta(ge=0, description="fresh blocks that one round may take")
    ] = 0
    planner: Annotated[PlannerName, Meta(description="plug: fill holes; pack: copy out")] = "plug"
    round_rule: Annotated[
        RoundRule,
        Meta(
            description="price: also reclaim when holes cost more than moving; "
            "paper: only under pressure"
        ),
    ] = "price"
    reclamation: Annotated[
        ReclamationMode, Meta(description="auto, paused (no new plans), off (naive-evict)")
    ] = "auto"
    recycle: Annotated[bool, Meta(description="write new tokens into dead slots")] = True
    budget_tokens: BudgetTokens = 2048
    budget_ratio: BudgetRatio = 0.0
    budget_floor_tokens: Annotated[
        int, Meta(ge=1, le=MAX_TOKENS, description="the least budget under budget_ratio")
    ] = 256
    interval_tokens: IntervalTokens = 128
    protect: Annotated[
        Protect,
        Meta(description="{template, system, last_user: true or false}: parts never evicted"),
    ] = Protect()
    probe: Annotated[
        Probe,
        Meta(
            description="{layers: [0..L-1], heads: [0..H-1], every_steps: 1..1024}; "
            "[]: the calibration profile's, else at 0.7 of the depth (key norms: 0.6), all heads"
        ),
    ] = Probe()
    evict_during: Annotated[
        EvictionPhase,
        Meta(description="decode: once the prompt is computed; prefill: between its chunks; both"),
    ] = "decode"
    evict_when: Annotated[
        EvictWhen,
        Meta(
            description="pressure: for blocks that somebody needs, down to the budget at most; "
            "always: whatever exceeds the budget"
        ),
    ] = "pressure"
    evict_after_wait_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="under pressure: how long a request waits before others lose tokens for it",
        ),
    ] = 0
    admission: Annotated[
        AdmissionRule,
        Meta(
            description="compressed: by what a request will hold after eviction; stock: vLLM's rule"
        ),
    ] = "compressed"
    verify_ratio: VerifyRatio = 0.0
    prefix_sharing: Annotated[
        PrefixSharing,
        Meta(description="shared blocks: skip; index: release all-dead ones; copy: also copy out"),
    ] = "index"
    shadow: Annotated[
        P | None,
        Meta(description="{name, params} of a policy that is compared, not applied; null: none"),
    ] = None
    canary: Annotated[
        Canary,
        Meta(description="{share, control_share}, 0..1: check finished requests; share 0: off"),
    ] = Canary()


class PoolLimits(msgspec.Struct, frozen=True):
    """A setting whose bound and default depend on the pool."""

    maximum: int
    default: int


def pool_limits(num_blocks: int) -> dict[str, PoolLimits]:
    """Field -> limits, for a pool of `num_blocks` usable blocks."""
    headroom = min(max(2, num_blocks // 32), num_blocks // 2)
    return {
        "batch_size": PoolLimits(max(1, num_blocks), default=min(32, num_blocks)),
        "low_watermark_blocks": PoolLimits(num_blocks, default=max(1, num_blocks // 8)),
        "headroom_blocks": PoolLimits(num_blocks // 2, default=headroom),
    }


class ConfigValues(Configuration[PolicyChoice], frozen=True, kw_only=True):
    pass


class Bound(Doc):
    type: str  # "int", "float", "bool", "enum", "object"
    summary: str
    minimum: float | None = None
    maximum: float | None = None
    choices: list[str] | None = None


MAX_TRIAL_SECONDS = 86_400  # for `confirm_within_s` and `guard_for_s`
GUARD_SECONDS = 300  # how long guards hold when neither of the two is given
GUARD_COUNT = 20  # fewest samples that a percentile or mean rests on, unless given
MAX_GUARD_COUNT = 200  # fits the window of the canary's figures
MAX_GUARDS = 16


class Guard(Doc):
    """A limit on a metric: the change is reverted when the metric crosses it.

    A counter is compared with its increase since the change; latency and the canary's means are of
    what happened since the change.
    """

    # A series of docs/metrics.md, `canary_agreement{group=evicting}`; or `rate(preemptions)`, the
    # increase a second over the newest minute since the change. Units are those of the metric.
    metric: str
    above: float | None = None  # reverted above this; one of the two is given
    below: float | None = None  # reverted below this
    min_count: int | None = None  # fewest samples; None where a value rests on none
    value: float | None = None  # in `Status.guards`: now; compared once it rests on `min_count`
    count: int | None = None  # in `Status.guards`: samples so far

    @property
    def limit(self) -> float:
        """`above` or `below`, whichever is given."""
        found = self.above if self.below is None else self.below
        return math.nan if found is None else found


# Field of `GuardLimits` -> metric, side, and the unit of the limit in units of the metric.
NAMED_LIMITS: dict[str, tuple[str, Literal["above", "below"], float]] = {
    "inter_token_p95_ms": ("latency_seconds{kind=inter_token,quantile=0.95}", "above", 1e-3),
    "preemptions": ("preemptions", "above", 1),
    "canary_agreement": ("canary_agreement{group=evicting}", "below", 1),
    "canary_logprob_lost": ("canary_logprob_lost{group=evicting}", "above", 1),
}


class GuardLimits(Doc):
    """The guards that had fields of their own, before `Guard` named any metric."""

    inter_token_p95_ms: float | None = None
    preemptions: int | None = None
    canary_agreement: float | None = None
    canary_logprob_lost: float | None = None
    canary_count: int = GUARD_COUNT  # the canary's `min_count`

    @staticmethod
    def of(guards: list[Guard]) -> GuardLimits | None:
        """The limits among `guards` that have a field; None without any."""
        limits = GuardLimits()
        for name, (metric, side, unit) in NAMED_LIMITS.items():
            for guard in guards:
                limit = getattr(guard, side)
                if guard.metric != metric or limit is None:
                    continue
                limit = round(limit / unit, 9)
                setattr(limits, name, math.floor(limit) if name == "preemptions" else limit)
                if name.startswith("canary_"):
                    limits.canary_count = guard.min_count or GUARD_COUNT
        return None if limits == GuardLimits() else limits

    def guards(self) -> list[Guard]:
        """The same as guards."""
        found = []
        for name, (metric, side, unit) in NAMED_LIMITS.items():
            limit = getattr(self, name)
            if limit is not None:
                guard = Guard(metric=metric, **{side: round(limit * unit, 12)})
                guard.min_count = self.canary_count if name.startswith("canary_") else None
                found.append(guard)
        return found


class Trial(Doc):
    """A change that is reverted unless confirmed in time, or when a guard's limit is crossed."""

    revision: int  # the one on trial
    actor: str
    started_ts: float
    expires_ts: float | None = None  # None: guarded only
    guard: GuardLimits | None = None  # of `guards`, for readers that do not know them
    guard_until_ts: float | None = None
    changes: dict[str, list[Any]] = {}  # field -> [old, new]
    guards: list[Guard] = []

    def __post_init__(self) -> None:
        if self.guards:
            self.guard = GuardLimits.of(self.guards)
        elif self.guard is not None:  # of an older server
            self.guards = self.guard.guards()


class ConfigDocument(Doc):
    revision: int  # of `desired`
    desired: ConfigValues  # accepted; in force from the next step on
    # The configuration of the engine's newest step. While no request holds a block no step runs,
    # and `desired` is effective at once.
    effective: ConfigValues
    bounds: dict[str, Bound]
    effective_revision: int = 0
    trial: Trial | None = None


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
    # shortage; running requests can give `givable_tokens` in all until each is at its floor.
    short_blocks: int = 0
    givable_tokens: int = 0
    givable_blocks: int = 0
    # How many more requests of the running ones' mean size fit before one ends, at their peaks.
    # None: no running request evicts, or an older server.
    more_requests: int | None = None


class PatchResult(Doc):
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


class Operation(Doc):
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


class Forgotten(Doc):
    """What a request was told to forget. Its live tokens of these spans die before all others."""

    request_id: str
    spans: list[tuple[int, int]]  # [start, end) of token ids, of this call and before, ascending
    new_tokens: int  # of this call, and not forgotten before; 0: it changed nothing
    live_tokens: int  # forgotten tokens that are still live
    revision: int  # of the configuration
    notes: list[str] = []  # e.g. that nothing is evicted


class BlocksDocument(Doc):
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


class BlockDetail(Doc):
    id: int
    live: int
    ref_cnt: int
    flags: int
    pinned: Pinned
    owners: list[BlockOwner]
    slots: list[BlockSlot]


class RequestRow(Doc):
    """A request. `waiting` and `preempted` ones hold no block and have only their lengths.
    `finished` ones hold none either; `live` is what they kept at their end.

    Only the first requests of a long queue have a row; `RequestCounts` counts all.
    """

    id: str
    state: RequestState
    live: int
    dead: int  # evicted tokens of this request, wherever their slots are now
    prompt_tokens: int
    output_tokens: int
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
    given_tokens: int = 0  # of the dead ones: died because memory was short
    givable_tokens: int = 0  # that it can give now, in whole blocks; 0 under "always"


class RequestDetail(RequestRow):
    block_table: list[int] = []
    block_live: list[int] = []  # live tokens of this request, a block of block_table
    # [start, end) of token ids that are never evicted, ascending; they count against the budget.
    protected: list[tuple[int, int]] = []
    # Parts of the prompt ("template", "system", "last_user") that do not fit the budget and are
    # protected partly or not at all.
    protection_cut: list[str] = []
    ended_ts: float | None = None  # of a finished request; the newest 1,024 can be looked up
    # [start, end) of token ids that die before all others, ascending; protected ones do not die.
    forgotten: list[tuple[int, int]] = []


class TokenRow(Doc):
    token_id: int  # logical id
    position: int  # RoPE position; equal to the logical id
    block: int | None  # None if dead and its slot was returned or recycled
    offset: int | None
    live: bool
    score: float | None = None  # of the policy's signal, if it has one
    protected: bool = False  # never evicted
    forgotten: bool = False  # dies first


class TokenPage(Doc):
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


class TextPage(Doc):
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


class EventPage(Doc):
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


class AuditPage(Doc):
    entries: list[AuditEntry]  # oldest first
    dropped: int = 0  # entries no longer held
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


class Change(Doc):
    """What became of a call that changes something."""

    id: str  # of the call, see the header X-VToken-Change
    state: ChangeState  # not_applied: none of the newest 1,000, and refused if it comes later
    result: PatchResult | None = None  # applied: the answer to a change of the configuration
    operation: Operation | None = None  # applied: the compaction as it was accepted
    forgotten: Forgotten | None = None  # applied: the answer to a call that forgets tokens
    problem: Problem | None = None  # refused: nothing was changed


# ---------------------------------------------------------------- bus: api <-> engine


class Describe(Doc):
    epoch: str
    vtoken_version: str
    vllm_version: str
    model: str
    device: str
    geometry: Geometry
    telemetry_endpoint: str  # ZMQ SUB connects here
    policies: list[PolicyInfo]
    started_ts: float


class TextSource(Doc):
    """A page of a text before it is decoded."""

    page: TextPage  # its texts are None
    # Vocabulary ids of up to TEXT_CONTEXT_TOKENS tokens before the page, then of the page;
    # NO_TOKEN_ID for a position of a prompt that was given as embeddings.
    words: list[int]


TEXT_CONTEXT_TOKENS = 64  # more than any character or decoder spans
NO_TOKEN_ID = -1


class Reply(Doc):
    """The answer to a `vtoken.commands.Command`."""

    value: Any = None
    problem: Problem | None = None
    engine_s: float = 0.0  # CPU time of the engine's thread


class Frame(Doc):
    """The state of the engine.

    The command `frame` returns a complete one. On topic `state`, published only while it has a
    subscriber, a frame may omit what has not changed or is sent less often, see
    `vtoken.stream.frames`.
    """

    step: int
    live: bytes  # u16[num_blocks] little-endian
    flags: bytes  # u8[num_blocks]
    status: Status | None = None  # status, requests and config: all or none
    requests: list[RequestRow] | None = None
    config: ConfigDocument | None = None
    owner: bytes = b""  # u16[num_blocks]: `number` of the newest holder, 0 for a free block
    number: int = 0  # of published frames, from 1; 0: not published
    block_ids: bytes | None = None  # u32[k]: the arrays cover these blocks only; None: all


BLOCK_ARRAYS = (("live", "<u2"), ("flags", "u1"), ("owner", "<u2"))  # fields of a frame


TOPIC_STATE = b"state"  # frames [topic, msgpack Frame]
TOPIC_EVENTS = b"events"  # frames [topic, msgpack list[Event]]

# ---------------------------------------------------------------- stream: server -> client


class Message(Doc, tag_field="type"):
    """Base of stream messages. `seq` increases by one per message within a connection's epoch."""

    epoch: str
    seq: int
    step: int
    ts: float


class Hello(Message, tag="hello"):
    schema: int
    vtoken_version: str
    vllm_version: str
    model: str
    device: str
    geometry: Geometry
    policies: list[PolicyInfo]
    topics: list[str]
    fps: float  # granted
    can_control: bool
    resumed: bool = False
    read_only_reason: str = ""  # why `can_control` is false
    can_read_text: bool = False  # whether this client may read the text of requests


class Snapshot(Message, tag="snapshot"):
    status: Status | None  # topic metrics
    config: ConfigDocument
    live: PackedArray | None  # u16[num_blocks]; topic blocks
    flags: PackedArray | None
    requests: list[RequestRow] | None  # topic requests
    owner: PackedArray | None = None  # u16[num_blocks]; topic blocks


class Delta(Message, tag="delta"):
    """The changes since the last snapshot or delta. A field that is None has not changed."""

    block_ids: PackedArray | None = None  # u32[k]
    block_live: PackedArray | None = None  # u16[k]
    block_flags: PackedArray | None = None  # u8[k]
    block_owner: PackedArray | None = None  # u16[k]
    requests_changed: list[RequestRow] | None = None
    requests_removed: list[str] | None = None
    status: Status | None = None
    config: ConfigDocument | None = None


class EventMessage(Message, tag="event"):
    event: Event


class Dropped(Message, tag="dropped"):
    n: int  # events that this client has missed; a new snapshot follows


class Heartbeat(Message, tag="heartbeat"):
    pass


StreamMessage = Hello | Snapshot | Delta | EventMessage | Dropped | Heartbeat


# ---------------------------------------------------------------- recordings
# A recording is text, one JSON document a line, gzip-compressed if its name ends in `.gz`: a
# `recording` line, then stream messages (format json), `audit` lines and, if text is recorded,
# `text` lines, in the order of their ts. Reading can start at every `hello` + `snapshot`. A reader
# skips lines of unknown types.

RECORDING_SCHEMA = 2  # with text; recordings without text are schema 1, which every reader reads


class RecordingHeader(Doc, tag_field="type", tag="recording"):
    schema: int
    vtoken_version: str
    created_ts: float
    source: str  # URL of the server, or "flight recorder"
    holds_text: bool = False  # whether `text` lines may follow


class AuditLine(Doc, tag_field="type", tag="audit"):
    entry: AuditEntry


class TextLine(Doc, tag_field="type", tag="text"):
    """The complete text of a request, as known after the previous message."""

    ts: float  # of that message
    page: TextPage  # every token whose text is known: `start` is 0


RecordingLine = RecordingHeader | AuditLine | TextLine | StreamMessage


def pack_array(values: Any, *, packed: bool) -> PackedArray:
    """A numpy array as bytes (`packed`, for msgpack) or as a list of integers (for JSON)."""
    out: PackedArray = values.tobytes() if packed else values.tolist()
    return out


def unpack_array(values: PackedArray, dtype: str) -> Any:
    """The numpy array packed by `pack_array`; `dtype` is "u1", "<u2" or "<u4"."""
    import numpy as np

    if isinstance(values, bytes):
        return np.frombuffer(values, dtype=dtype)
    return np.asarray(values, dtype=dtype)
