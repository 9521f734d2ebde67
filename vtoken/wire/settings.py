"""The settings that operators may change live, and a change on trial with its guards.

A setting is a field of `Configuration`: flags, bounds and forms are generated from it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from vtoken.wire.doc import Doc, OfEngine

MAX_TOKENS = 1 << 24
MAX_PARK_BYTES = 1 << 46

ReclamationMode = Literal["auto", "paused", "off"]
PlannerName = Literal["plug", "pack"]
EvictionPhase = Literal["decode", "prefill", "both"]
EvictWhen = Literal["pressure", "always"]
PrefixSharing = Literal["skip", "index", "copy"]


class PolicyChoice(Doc):
    name: str
    params: dict[str, Any] = {}


class FactsFound(Doc):
    """Share of facts that answers contain, where requests keep the share `keep` of their prompt.

    Measured on SmolLM2-135M-Instruct for docs/quality.md, with the policy's default parameters.
    """

    keep: float
    found: float  # the question is in the prompt
    later: float | None = None  # the question comes after the eviction; None: not measured


class PolicyInfo(Doc):
    name: str
    summary: str
    source: str  # arXiv id or "-"
    needs: list[str]  # of "attention", "keys", "token_ids"
    params_schema: dict[str, Any]  # JSON schema of `policy.params`
    error: str | None = None  # why this policy of another package cannot be loaded
    quality: list[dict[str, Any]] = []  # of older servers, which measured their model
    facts: list[FactsFound] = []  # of a small model that is not this one; []: not measured


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
        Meta(description="[]: the one at the default depth of the signal"),
    ] = []
    heads: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(description="query heads, the same in each layer; []: all"),
    ] = []
    every_steps: Annotated[int, Meta(ge=1, le=1024, description="probe every k-th step")] = 1


class Protect(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a chat prompt that are never evicted, in the order in which they are protected."""

    template: Annotated[
        bool, Meta(description="the chat template's first tokens, and the answer's role header")
    ] = True
    system: Annotated[bool, Meta(description="the system prompt")] = True
    tools: Annotated[bool, Meta(description="the schemas of tools")] = True
    last_user: Annotated[bool, Meta(description="the last user turn, no tool's result")] = False


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


Planner = Annotated[PlannerName, Meta(description="plug: fill holes; pack: copy out")]
RoundRule = Annotated[
    Literal["price", "paper"],
    Meta(
        description="price: also reclaim when holes cost more than moving; "
        "paper: only under pressure"
    ),
]
AdmissionRule = Annotated[
    Literal["compressed", "stock"],
    Meta(description="compressed: by what a request will hold after eviction; stock: vLLM's rule"),
]


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to compare the defaults with something else, as the evaluation does.

    A server that only serves leaves them alone.
    """

    planner: Planner = "plug"
    round_rule: RoundRule = "price"
    admission: AdmissionRule = "compressed"


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
        Meta(
            description="{template, system, tools, last_user: true or false}: parts never evicted"
        ),
    ] = Protect()
    probe: Annotated[
        Probe,
        Meta(
            description="{layers: [0..L-1], heads: [0..H-1], every_steps: 1..1024}; "
            "[]: the layer at the default depth of the signal, all heads"
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
    evict_per_token_left: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_TOKENS,
            description="under pressure: the most tokens that a request loses for each token that "
            "it has left to generate",
        ),
    ] = 8
    park_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_PARK_BYTES,
            description="host memory for tokens that gave way, over all ranks; 0: they are lost",
        ),
    ] = 0
    restore_after_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="wait after a shortage before parked tokens come back",
        ),
    ] = 500
    slo: Annotated[
        str,
        Meta(
            description="objectives of latency, as in ttft<2s, itl<80ms (first token; mean between "
            "tokens); empty: none"
        ),
    ] = ""
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
    experiment: Annotated[
        Experiment,
        Meta(description="{planner, round_rule, admission}: for experiments, not for serving"),
    ] = Experiment()


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
    """A configuration on the wire."""


def config_changes(old: ConfigValues, new: ConfigValues) -> dict[str, list[Any]]:
    """Field -> [old, new] of every field that differs, in builtins."""
    a, b = msgspec.to_builtins(old), msgspec.to_builtins(new)
    names = Configuration.__struct_fields__
    return {name: [a[name], b[name]] for name in names if a[name] != b[name]}


# Fields that decide which tokens of a request are evicted, and when.
OF_EVICTION = (
    "budget_tokens",
    "budget_ratio",
    "budget_floor_tokens",
    "interval_tokens",
    "evict_during",
    "evict_when",
    "evict_after_wait_ms",
    "evict_per_token_left",
    "protect",
)


# Fields that decide whether evicted tokens are lost, and when they come back.
OF_PARKING = ("park_bytes", "restore_after_ms")


def void_settings(config: Configuration[Any]) -> dict[str, str]:
    """Field -> which other setting keeps it without effect, as text; a part is `canary.share`."""
    found: dict[str, str] = {}
    if config.reclamation != "auto":
        why = f"no effect: reclamation is {config.reclamation}"
        found |= {"theta_f": why, "low_watermark_blocks": why, "restore_after_ms": why}
    if not config.park_bytes:
        found["restore_after_ms"] = "no effect: park_bytes is 0"
    if config.budget_ratio > 0:
        limit = "floor" if config.evict_when == "pressure" else "budget"
        why = f"no effect: budget_ratio {config.budget_ratio:g} decides the {limit}"
        found["budget_tokens"] = why
    else:
        found["budget_floor_tokens"] = "no effect: budget_ratio is 0"
    if config.evict_when == "always":
        why = "only for requests with vtoken_evict_when=pressure, while evict_when is always"
        found |= dict.fromkeys(("evict_after_wait_ms", "evict_per_token_left"), why)
    if config.policy.name == "none":
        why = "only for requests with a policy of their own, while policy is none"
        found = dict.fromkeys((*OF_EVICTION, *OF_PARKING), why) | found
    if not config.canary.share:
        found["canary.control_share"] = "no effect: canary.share is 0"
    return found


class Bound(Doc):
    type: str  # "int", "float", "bool", "str", "enum", "object"
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


class Trial(Doc):
    """A change that is reverted unless confirmed in time, or when a guard's limit is crossed."""

    revision: int  # the one on trial
    actor: str
    started_ts: float
    expires_ts: float | None = None  # None: guarded only
    guard_until_ts: float | None = None
    changes: dict[str, list[Any]] = {}  # field -> [old, new]
    guards: list[Guard] = []
    engines: list[int] = []  # that try the change together; []: this one alone
    followers: list[int] = []  # engines that make the change when it is kept here


class Made(Doc):
    """The change that made a revision."""

    actor: str
    ts: float
    fields: list[str]


class ConfigDocument(OfEngine, kw_only=True):
    revision: int  # of `desired`
    desired: ConfigValues  # accepted; in force from the next step on
    # The configuration of the engine's newest step. While no request holds a block no step runs,
    # and `desired` is effective at once.
    effective: ConfigValues
    bounds: dict[str, Bound]
    effective_revision: int = 0
    trial: Trial | None = None
    made: Made | None = None  # None: the configuration of the start, or an older server

    def __post_init__(self) -> None:
        """A server before 0.3.0 names no `evict_when` in its bounds, and evicts always."""
        if self.bounds and "evict_when" not in self.bounds:
            self.desired = msgspec.structs.replace(self.desired, evict_when="always")
            self.effective = msgspec.structs.replace(self.effective, evict_when="always")
