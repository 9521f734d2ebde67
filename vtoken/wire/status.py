"""The status: what the engine does now and has done since it started, in one document."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from vtoken.wire.doc import Doc, OfEngine
from vtoken.wire.settings import EvictWhen, Guard, PolicyChoice, ReclamationMode

Cause = Literal["ok", "fragmented", "full"]
SchedulingState = Literal[
    "running",
    "paused_new",  # vLLM starts no new request
    "paused",  # vLLM schedules nothing
]
LayersFrom = Literal[
    "configured",  # `probe.layers`
    "default depth",  # of this kind of signal
    "profile",  # an older server, which had measured them
]
GroupKind = Literal[
    "full",  # full attention
    "window",
    "chunked",  # attention within chunks of the context
    "state",  # Mamba, linear attention
]
HealthPart = Literal["engine", "frames", "audit", "recorder"]
PeakName = Literal["waiting", "short_blocks", "used_share", "ttft_p95_ms", "inter_token_p95_ms"]
AdviceLevel = Literal[
    "short",  # requests wait, or lose tokens, and something can be done
    "near",  # they soon may
    "note",  # nobody waits for it
]
WaitsFor = Literal[
    "",  # no block is short
    "giving",  # requests give in the next step
    "patience",  # they give once the first waiting request has waited `evict_after_wait_ms`
    "resume",  # reclamation is paused or off: nobody gives
    "end",  # all that can be given is not enough: a request must end
]
FEWEST_DRAFTS = 1000  # a share of fewer says little


ParkWait = Literal[
    "",  # nothing is parked, or it comes back in the next steps
    "memory",  # a block is short or nearly so, or too few are free for it
    "time",  # `restore_after_ms` since the newest shortage are not over
    "resume",  # reclamation is paused or off
    "budget",  # under `evict_when: always`: what is parked exceeds the budgets
]


class BlockCounts(Doc):
    total: int  # usable blocks of the pool, without the null block
    free: int
    used: int
    partially_live: int  # used, 0 < live < block_size
    low_utilization: int  # used, live <= block_size / 2
    shared: int  # held by two requests or more
    headroom: int  # fresh blocks that one planning round may take
    withheld: int = 0  # of `free`: vLLM's --watermark keeps them from waiting requests


class CacheGroup(Doc):
    """One of the engine's groups of layers; all take blocks of one pool.

    A model of full attention alone has one group, and `Status.groups` is empty.
    """

    index: int  # vLLM's number of the group
    kind: GroupKind
    managed: bool  # policies evict its tokens; `blocks`, `tokens` and F of the status are of it
    layers: int
    block_size: int
    blocks: int  # held by requests
    bytes: int  # of these blocks, over all ranks


class TokenCounters(Doc):
    evicted: int = 0
    generated: int = 0  # sampled tokens; tokens per second is its derivative


class TokenCounts(TokenCounters, kw_only=True):
    live: int  # live slots in used blocks; a shared slot counts once
    dead: int  # evicted tokens that still occupy a slot of a used block, summed over requests


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
    sentence: str = ""  # one line of this status in plain words, by the API process that answers
    # What the planner found: in a status that was asked for now, in one of the stream at most a
    # second ago.
    reclaimable_blocks: int = 0  # so many would one compaction (within B) free
    reclaim_moved_tokens: int = 0  # that it would move
    reclaim_moved_bytes: int = 0
    low_watermark_blocks: int = 0
    gates: list[Gate] = []
    advice: str = ""  # the first text of `Status.advice`, by the API process that answers
    held_s: float = 0.0  # how long ago `cause` was last true: a worse one is kept for 2 s
    held_for: WaitsFor = ""  # the worst `MemoryPressure.waits_for` of the last 2 s


class ReclamationCounters(Doc):
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
    since_ts: float | None = None  # of `state`; None: since the engine's start
    by: str = ""  # who set it


class Price(Doc):
    """The cost of one token or one request in µs; a prior until the first sample."""

    us: float
    per: Literal["token", "request"]
    source: Literal["measured", "prior"]
    samples: int  # measured steps or rounds so far


class RoundPrices(Doc):
    """The prices of holes, copies and probes on this machine, and the worth of a round now."""

    hole: Price  # packing one token of a partial block, for one step of attention over all layers
    copy: Price  # moving one token
    plan: Price  # planning one request of a round
    probe: Price | None = None  # one request's decode query; None: an older server
    park: Price | None = None  # copying one token to host memory; None: an older server
    restore: Price | None = None  # copying one token back from host memory; None: an older server
    saving_us: float = 0.0  # of a round now: packing until its holes would close, or more come
    cost_us: float = 0.0  # of a round now: its copies and its plan
    loose_tokens: int = 0  # tokens of partial blocks that the next step would not pack
    moved_tokens: int = 0  # estimate of the tokens that it would copy
    requests: int = 0  # requests whose tokens it would move


class FirstWaiting(Doc):
    """What the first waiting request lacks; those behind it wait for it."""

    id: str
    needed_blocks: int  # that must be free for it, withheld ones included
    withheld_blocks: int  # that vLLM's --watermark keeps from it
    short_blocks: int  # that are not free, with those that it leaves to running requests
    reread_tokens: int  # of a preempted one: computed again
    patience_s: float  # before others give for it; at most 0: they give now


class RequestCounters(Doc):
    preempted: int = 0  # preemptions
    finished: int = 0


class RequestCounts(RequestCounters, kw_only=True):
    running: int
    waiting: int
    oldest_wait_s: float = 0.0  # of the waiting ones, since its arrival or preemption
    idle: int = 0  # sessions that wait for their clients
    sessions: int = 0  # streaming-input sessions that hold blocks, idle or not
    session_blocks: int = 0  # that these hold, and do not give
    first: FirstWaiting | None = None  # None: no waiting request lacks blocks, or an older server


class InvariantCounters(Doc):
    checked: int = 0  # commits
    violations: int = 0
    verified_relocations: int = 0  # contents hashed before and after
    verify_us: int = 0  # time in that


class Invariants(InvariantCounters, kw_only=True):
    strict: bool = True  # a violation stops the engine; fixed at start-up
    check_every_step: bool = False  # every step recomputes all tables; fixed at start-up


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


class SignalLayers(Doc):
    """The layers and heads that the current policy's signal comes from."""

    source: LayersFrom
    signal: str | None = None  # its kind; None: the current policy has no signal
    layers: list[int] = []
    heads: list[int] = []  # query heads, of each of the layers; []: all
    # Of the profile of older servers, which measured their model.
    detail: str = ""
    file: str = ""
    fingerprint: str = ""
    model: str = ""
    created_ts: float | None = None
    outdated_by: str = ""


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


class PressureCounters(Doc):
    given_tokens: int = 0  # died under pressure
    preemptions_above_floor: int = 0  # while somebody could have given a block


class MemoryPressure(PressureCounters, kw_only=True):
    """Who needs blocks, and who gives tokens for them: requests under `evict_when: pressure`."""

    near: bool  # requests may have to give soon, so their signals are computed
    # What is short now, whether or not anybody gives for it. With the fields below and the free
    # blocks: max(growth + asked + headroom, asked + future - givable) - free, and at least 0. The
    # second term is for a waiting request alone, `asked_blocks` > 0; without either, none is short.
    short_blocks: int
    growth_blocks: int  # that running requests take within the next steps
    asked_blocks: int  # that must be free for the first waiting request
    givers: int  # running requests that can give
    givable_tokens: int  # that they can give in whole blocks, until each is at its floor
    givable_blocks: int
    recent_tokens: int  # given in the last `window_s` seconds
    recent_givers: int  # by this many requests
    window_s: float
    spared_tokens: int  # live above the floors: kept because nobody needed their memory
    # Finished requests by the live share of their tokens at their end: upper bound -> how many have
    # at most this share, and more than the bound before.
    kept_shares: dict[str, int] = {}
    kept_share_sum: float = 0.0
    headroom_blocks: int = 0  # that stay free beside what is needed
    # What running requests will take until their ends, with the headroom; 0 while none waits for
    # blocks.
    future_blocks: int = 0
    waits_for: WaitsFor = ""  # what ends the shortage
    advice: str = ""  # as `Fragmentation.advice`


class ParkingCounters(Doc):
    """Copies of evicted tokens in host memory; a token is counted once, not once a rank."""

    copied_tokens: int = 0  # to host memory
    restored_tokens: int = 0
    thrashed_tokens: int = 0  # gave way again within 5 s of their return
    dropped_tokens: int = 0  # lost for want of host memory: their copy was given up, or not made
    park_us: int = 0  # time in copies to host memory
    restore_us: int = 0  # time in copies from it
    # Preempted requests that were parked whole instead of computed again, and their live tokens.
    swapped_requests: int = 0
    swapped_tokens: int = 0
    # Preempted requests that were computed again instead, by reason: "unsettled", "prompt",
    # "groups", "moving", "price" or "memory".
    swaps_refused: dict[str, int] = {}


class Parking(ParkingCounters, kw_only=True):
    """Evicted tokens that have a copy in host memory, so that they can come back. Bytes are those
    of all ranks.
    """

    capacity_bytes: int  # `park_bytes`, in whole tokens
    used_bytes: int  # by copies, those of live tokens included
    peak_bytes: int  # most of `used_bytes` since the engine's start
    tokens: int  # parked now: evicted, with a copy
    clean_tokens: int  # live, with a copy: they came back, and their next eviction needs no copy
    # That came back since memory was last short; 0 once none has come back for 10 s.
    back_tokens: int = 0
    # Of preempted requests that wait, in host memory: they go on from them.
    waiting_tokens: int = 0
    waits_for: ParkWait = ""  # why what is parked does not come back now
    fault: str = ""  # why nothing is parked until `park_bytes` changes


class Peak(Doc):
    """The highest value of one fact in the last 24 hours."""

    name: PeakName  # "used_share": used blocks of all, 0..1
    value: float
    ts: float  # when it was first that high


class Slo(Doc):
    """How many requests met the setting `slo`, of those that ended in the last `window_s` seconds.

    A request meets it as in `vllm bench serve --goodput`: the time to its first token is within
    `ttft`, and the mean time between its tokens, 0 for a single one, within `itl`. One that ended
    without a token counts if it had waited longer than `ttft`.
    """

    text: str  # the setting, as in "ttft<2s, itl<80ms"
    window_s: float
    count: int = 0  # requests that count
    met: int = 0  # of these, met every limit
    share: float | None = None  # of `met`, 0..1: goodput; None: `count` is 0


class Serving(Doc):
    """What vLLM knows of the requests since the engine started."""

    length_capped: int = 0  # ended because the context of the model was full
    draft_tokens: int = 0  # that speculative decoding proposed
    accepted_draft_tokens: int = 0
    # Tokens of requests that looked into the prefix cache at their first start, and those of them
    # that it had.
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


class DraftFigures(Doc):
    """Drafts that steps under one revision of the configuration verified."""

    revision: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def share(self) -> float | None:
        """The share of the accepted ones, 0..1; None while fewer than FEWEST_DRAFTS were verified:
        it says little.
        """
        enough = self.proposed_tokens >= FEWEST_DRAFTS
        return self.accepted_tokens / self.proposed_tokens if enough else None


class Remedy(Doc):
    """A change of the configuration, and what the planner finds under it."""

    change: dict[str, Any]  # fields to set
    givable_blocks: int = 0  # that running requests can give then, or lose at once under `always`
    startable_requests: int = 0  # of the waiting ones, then
    freed_blocks: int = 0  # by the compaction that then runs


class Relief(Doc):
    """What would relieve a memory that is short or nearly so, by the planner: in a status that was
    asked for now, in one of the stream at most a second ago.
    """

    remedies: list[Remedy] = []  # at most one for each way out
    startable_requests: int = 0  # of the waiting ones, now
    more_requests: int | None = None  # like the running ones, now; as in `WhatIf`
    # What the pool lacks for all that wait to start now, and `--kv-cache-memory-bytes` with it; 0
    # if it lacks nothing, or if the size of a block is not known.
    missing_blocks: int = 0
    memory_bytes: int = 0


class Advice(Doc):
    """One thing that an operator can do about the state of the engine."""

    code: str  # what it is about, the same in every release
    level: AdviceLevel
    text: str  # one clause with its figures
    change: dict[str, Any] = {}  # fields of the configuration to set
    command: str = ""  # the command that does it
    action: str = ""  # the console's key that does it, by the name of its action


class Counters(Doc):
    """What an engine has counted since it started; the runtime counts in these fields.

    Each is the base of the part of `Status` of the same name, which therefore shows its fields.
    """

    tokens: TokenCounters = msgspec.field(default_factory=TokenCounters)
    reclamation: ReclamationCounters = msgspec.field(default_factory=ReclamationCounters)
    requests: RequestCounters = msgspec.field(default_factory=RequestCounters)
    invariants: InvariantCounters = msgspec.field(default_factory=InvariantCounters)
    pressure: PressureCounters = msgspec.field(default_factory=PressureCounters)
    serving: Serving = msgspec.field(default_factory=Serving)
    parking: ParkingCounters = msgspec.field(default_factory=ParkingCounters)


class Status(OfEngine, kw_only=True):
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
    # What a request without rules of its own keeps, and when it evicts; each is 0 while another
    # field makes it void. `budget_ratio` above 0: the budget is this share of its prompt, and
    # `budget_floor_tokens` at least; else it is `budget_tokens`.
    budget_tokens: int
    interval_tokens: int  # with `evict_when: always` it evicts above budget + interval
    requests: RequestCounts
    invariants: Invariants
    config_revision: int
    step_ms: float = 0.0  # median time between two steps while busy, the newest 64; 0: none yet
    latency: Latency | None = None
    shadow: Shadow | None = None
    scheduling: SchedulingState = "running"
    paused_since_ts: float | None = None  # of `scheduling`; None while it is "running"
    prices: RoundPrices | None = None  # None: an older server
    calibration: SignalLayers | None = None  # None: an older server
    health: list[Health] = []  # filled in by the API process that answers
    budget_ratio: float = 0.0
    budget_floor_tokens: int = 0
    canary: CanaryStatus | None = None  # None: off since the engine started
    pressure: MemoryPressure | None = None  # None: no request gives, now or if one came
    guards: list[Guard] = []  # of the change on trial, with their values now
    groups: list[CacheGroup] = []  # []: one group, or an older server
    evict_when: EvictWhen | None = None  # None: an older server
    slo: Slo | None = None  # None: the setting is empty
    serving: Serving | None = None  # None: an older server
    relief: Relief | None = None  # None: memory is ample, or an older server
    parking: Parking | None = None  # None: off and nothing is parked, or an older server
    drafts: list[DraftFigures] = []  # of the newest revisions that had any, newest first
    peaks: list[Peak] = []  # filled in by the API process that answers, as what follows
    advice: list[Advice] = []  # worst first; []: there is nothing to do

    @property
    def drafts_in_force(self) -> DraftFigures | None:
        """Of the revision in force; None before a step under it has verified one."""
        newest = next(iter(self.drafts), None)
        return newest if newest and newest.revision == self.config_revision else None


class Point(msgspec.Struct, array_like=True, frozen=True):
    """What a chart needs of one status; an array on the wire, in this order.

    Counters are cumulative. None: the server does not report it.
    """

    ts: float
    f: float
    theta_f: float
    free_blocks: int
    generated_tokens: int
    moved_tokens: int
    ttft_p95_ms: float | None
    inter_token_p95_ms: float | None
    copy_us: int
    plan_us: int
    given_tokens: int | None
    goodput: float | None = None  # 0..1
    waiting: int | None = None  # requests; None: an older server
    restored_tokens: int | None = None

    @staticmethod
    def of(status: Status) -> Point:
        done, latency, pressure = status.reclamation, status.latency, status.pressure
        return Point(
            ts=status.ts,
            f=status.fragmentation.f,
            theta_f=status.fragmentation.theta_f,
            free_blocks=status.blocks.free,
            generated_tokens=status.tokens.generated,
            moved_tokens=done.moved_tokens,
            ttft_p95_ms=None if latency is None else latency.ttft.p95_ms,
            inter_token_p95_ms=None if latency is None else latency.inter_token.p95_ms,
            copy_us=done.copy_us,
            plan_us=done.plan_us,
            given_tokens=None if pressure is None else pressure.given_tokens,
            goodput=None if status.slo is None else status.slo.share,
            waiting=status.requests.waiting,
            restored_tokens=None if status.parking is None else status.parking.restored_tokens,
        )
