"""The engine's metrics: name, type, help, labels, and how each value is read from a status.

One table for `/metrics` (`vtoken_api.metrics`), docs/metrics.md and the guards of trials
(`vtoken.wire.guards`). No label is a block or a request, so the number of series is bounded.
Counters start at the engine's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from vtoken import wire

S = TypeVar("S")
MetricKind = Literal["gauge", "counter", "histogram"]


class Buckets(NamedTuple):
    """The value of a histogram. `cumulative`: upper bound, how many values are at most that."""

    cumulative: Sequence[tuple[str, float]]
    sum: float


class Evidence(NamedTuple):
    """How many samples a value is a percentile or a mean of, and its standard error."""

    num: int
    error: float | None = None


Labels = tuple[str, ...]  # the values of a series' labels, in the order of its metric
Values = Iterable[tuple[Labels, float | Buckets]]


@dataclass(frozen=True, slots=True, eq=False)
class Metric(Generic[S]):
    """One metric family of an `S`.

    `name` excludes the prefix and a counter's `_total`. `value`: of its only series, or of each;
    None: it has none now. `labels`: label -> its values. `evidence`: of one series, in `samples`;
    None: a value rests on none. `needs`: the setting that is 0 or empty while there is no value.
    `titles`: what sentences call a series. `guards`: whether a guard may be on it.
    """

    name: str
    help: str
    value: Callable[[S], float | Values | None]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kind: MetricKind = "gauge"
    evidence: Callable[[S, Labels], Evidence] | None = None
    samples: str = ""
    needs: str = ""
    titles: Mapping[Labels, str] = field(default_factory=dict)
    guards: bool = True

    def read(self, source: S) -> Values:
        """The value of each series that has one."""
        found = self.value(source)
        if found is None:
            return ()
        return [((), float(found))] if isinstance(found, int | float) else found


_gauge: type[Metric[wire.Status]] = Metric
_counter = partial(_gauge, kind="counter")
_histogram = partial(_gauge, kind="histogram", guards=False)
_parking = partial(_gauge, needs="park_bytes")
# A setting, or the evidence of another metric: nothing that a change makes worse.
_fixed = partial(_gauge, guards=False)

BLOCK_STATES = ("free", "partially_live", "other_used")
CAUSES: tuple[str, ...] = get_args(wire.Cause)
REQUESTS = ("running", "waiting", "idle")
MODES: tuple[str, ...] = get_args(wire.ReclamationMode)
CONDITIONS = ("reclamation", "theta_f", "watermark", "pause", "low_utilization")
GATES = (*CONDITIONS, "price", "headroom")
DEFERRALS = (*CONDITIONS, "headroom", "in_flight")
KINDS = {"ttft": "TTFT", "inter_token": "inter-token"}  # of latencies -> in sentences
QUANTILES = {"0.50": "p50", "0.95": "p95", "0.99": "p99"}
LATENCIES: Mapping[Labels, str] = {
    (k, q): f"{QUANTILES[q]} {KINDS[k]}" for k in KINDS for q in QUANTILES
}
GROUPS = ("evicting", "control")
OUTCOMES = ("checked", "dropped", "failed", "skipped")
PRICED = ("hole", "copy", "park", "restore", "plan", "probe")


def _of_pressure(
    read: Callable[[wire.MemoryPressure], float],
) -> Callable[[wire.Status], float | None]:
    return lambda status: None if status.pressure is None else read(status.pressure)


def _of_parking(
    read: Callable[[wire.Parking], float],
) -> Callable[[wire.Status], float | None]:
    return lambda status: None if status.parking is None else read(status.parking)


def _kept_share(status: wire.Status) -> Values:
    if status.pressure is not None:
        counts = sorted((float(bound), n) for bound, n in status.pressure.kept_shares.items())
        totals = list(accumulate(n for _, n in counts))
        cumulative = [(str(bound), n) for (bound, _), n in zip(counts, totals, strict=True)]
        cumulative.append(("+Inf", totals[-1] if totals else 0))
        yield (), Buckets(cumulative, status.pressure.kept_share_sum)


def _one_of(choices: Iterable[str], current: str) -> Values:
    return [((choice,), float(choice == current)) for choice in choices]


def _states(status: wire.Status) -> Values:
    blocks = status.blocks
    full = blocks.used - blocks.partially_live
    return [
        (("free",), blocks.free),
        (("partially_live",), blocks.partially_live),
        (("other_used",), full),
    ]


def _latency(status: wire.Status) -> Values:
    if status.latency is None:
        return
    for kind in KINDS:
        found: wire.Percentiles = getattr(status.latency, kind)
        for quantile, name in QUANTILES.items():
            value_ms = getattr(found, f"{name}_ms")
            if value_ms is not None:
                yield (kind, quantile), value_ms / 1000


def _tokens(status: wire.Status, labels: Labels) -> Evidence:
    found = None if status.latency is None else getattr(status.latency, labels[0])
    return Evidence(found.count if found else 0)


def _goodput(status: wire.Status) -> float | None:
    return None if status.slo is None else status.slo.share


def _acceptance(status: wire.Status) -> float | None:
    """Of the revision in force; None while too few drafts were verified under it."""
    drafts = status.drafts_in_force
    return None if drafts is None else drafts.share


def _prices(status: wire.Status) -> Values:
    if status.prices is not None:
        for name in PRICED:
            price: wire.Price | None = getattr(status.prices, name)
            if price is not None and price.source == "measured":
                yield (name,), price.us / 1e6


def _round(status: wire.Status) -> Values:
    if status.prices is not None:
        yield ("saving",), status.prices.saving_us / 1e6
        yield ("cost",), status.prices.cost_us / 1e6


def _groups(status: wire.Status) -> dict[str, wire.CanaryFigures]:
    if status.canary is None:
        return {}
    return dict(zip(GROUPS, (status.canary, status.canary.control), strict=True))


def _canary_groups(name: str) -> Callable[[wire.Status], Values]:
    """The canary field `name` by group; a group without a mean has no sample."""

    def values(status: wire.Status) -> Values:
        for group, means in _groups(status).items():
            value = getattr(means, name)
            if value is not None:
                yield (group,), value

    return values


def _checked(name: str, count: str = "count") -> Callable[[wire.Status, Labels], Evidence]:
    """The checked requests that the mean `name` is of: the field `count`."""

    def evidence(status: wire.Status, labels: Labels) -> Evidence:
        means = _groups(status).get(labels[0], wire.CanaryFigures())
        return Evidence(getattr(means, count), getattr(means, f"{name}_se", None))

    return evidence


def _canary_counts(status: wire.Status) -> Values:
    if status.canary is not None:
        for outcome in OUTCOMES[:3]:
            yield (outcome,), getattr(status.canary, outcome)
        yield ("skipped",), sum(status.canary.skipped.values())


METRICS: tuple[Metric[wire.Status], ...] = (
    # Is memory the limit?
    _fixed("pool_blocks", "Blocks of the pool", lambda s: s.blocks.total),
    _gauge("blocks", "Blocks by state, which sum to the pool: free, partially_live (some slots "
           "live, some dead or unused), other_used", _states, {"state": BLOCK_STATES}),
    _gauge("low_utilization_blocks", "Used blocks that are at most half live",
           lambda s: s.blocks.low_utilization),
    _gauge("shared_blocks", "Blocks that two requests or more hold", lambda s: s.blocks.shared),
    _fixed("headroom_blocks", "Fresh blocks that one planning round may take",
           lambda s: s.blocks.headroom),
    _fixed("low_watermark_blocks", "Automatic rounds run at this many free blocks or fewer",
           lambda s: s.fragmentation.low_watermark_blocks),
    _gauge("cause", "1 for the current limit of admission: ok, fragmented or full",
           lambda s: _one_of(CAUSES, s.fragmentation.cause), {"cause": CAUSES}),
    _gauge("requests", "Requests by state: running, waiting, idle (sessions)",
           lambda s: [((name,), getattr(s.requests, name)) for name in REQUESTS],
           {"state": REQUESTS}),
    _counter("preemptions", "Preempted requests", lambda s: s.requests.preempted),
    _counter("finished_requests", "Finished requests", lambda s: s.requests.finished),
    _counter("generated_tokens", "Sampled tokens", lambda s: s.tokens.generated),
    # Who gives for what is short? Absent unless requests give, now or if one came
    _gauge("short_blocks", "Blocks that requests need, the headroom included, and that are not "
           "free", _of_pressure(lambda p: p.short_blocks)),
    _gauge("givers", "Running requests that can give tokens: they are above their floor",
           _of_pressure(lambda p: p.givers)),
    _gauge("givable_tokens", "Tokens that running requests can give, in whole blocks",
           _of_pressure(lambda p: p.givable_tokens)),
    _gauge("spared_tokens", "Live tokens above the floors of their requests",
           _of_pressure(lambda p: p.spared_tokens)),
    _counter("given_tokens", "Evicted tokens that gave way because memory was short",
             _of_pressure(lambda p: p.given_tokens)),
    _counter("preemptions_above_floor", "Preempted requests while a request could have given a "
             "block", _of_pressure(lambda p: p.preemptions_above_floor)),
    _histogram("kept_share", "Live share of a request's tokens at its end, 0..1, over "
           "finished requests", _kept_share),
    # What of it comes back? Absent while nothing is parked and `park_bytes` is 0
    _parking("parked_tokens", "Evicted tokens with a copy in host memory, that come back when "
             "memory is free", _of_parking(lambda p: p.tokens)),
    _parking("park_used_bytes", "Host memory that copies of tokens take, over all ranks",
             _of_parking(lambda p: p.used_bytes)),
    _parking("park_copied_tokens", "Tokens copied to host memory",
             _of_parking(lambda p: p.copied_tokens), kind="counter"),
    _parking("park_restored_tokens", "Tokens that came back",
             _of_parking(lambda p: p.restored_tokens), kind="counter"),
    _parking("park_thrashed_tokens", "Tokens that gave way again within 5 s of their return",
             _of_parking(lambda p: p.thrashed_tokens), kind="counter"),
    _parking("park_dropped_tokens", "Tokens lost for want of host memory: no copy is kept or made",
             _of_parking(lambda p: p.dropped_tokens), kind="counter"),
    _parking("swapped_requests", "Preempted requests that were not computed again",
             _of_parking(lambda p: p.swapped_requests), kind="counter"),
    # Why?
    _gauge("tokens", "Slots by state: live (a shared slot counts once), dead (evicted, block still "
           "in use)",
           lambda s: [(("live",), s.tokens.live), (("dead",), s.tokens.dead)],
           {"state": ("live", "dead")}),
    _gauge("f", "Share of held slots without a live token, 0..1", lambda s: s.fragmentation.f),
    _fixed("theta_f", "F above which automatic rounds run, 0..1",
           lambda s: s.fragmentation.theta_f),
    _gauge("reclaimable_blocks", "Blocks that one compaction would free now",
           lambda s: s.fragmentation.reclaimable_blocks),
    _gauge("held_blocks", "Blocks held; a shared block counts once for each holder",
           lambda s: s.reclamation.held_blocks),
    _gauge("naive_blocks", "Blocks that the same requests would hold without reclamation",
           lambda s: s.reclamation.blocks_without_reclaim),
    _gauge("packed_bound_blocks", "Blocks that the live tokens would fill if packed densely",
           lambda s: s.reclamation.packed_bound_blocks),
    _gauge("gate_open", "1 while this gate of an automatic round is open",
           lambda s: [((gate.name,), float(gate.open)) for gate in s.fragmentation.gates],
           {"gate": GATES}),
    _fixed("budget_tokens", "Live tokens that a request may keep; absent under budget_ratio",
           lambda s: s.budget_tokens or None),
    _fixed("budget_ratio", "Live tokens that a request may keep, as a share of its prompt, 0..1; "
           "absent under budget_tokens", lambda s: s.budget_ratio or None),
    _fixed("budget_floor_tokens", "The least that budget_ratio means; absent under budget_tokens",
           lambda s: s.budget_floor_tokens or None),
    # What does reclamation do?
    _fixed("reclamation", "1 for the current mode: auto, paused or off",
           lambda s: _one_of(MODES, s.reclamation.state), {"mode": MODES}),
    _counter("evicted_tokens", "Tokens that policies evicted", lambda s: s.tokens.evicted),
    _counter("relocations", "Relocations", lambda s: s.reclamation.relocations),
    _counter("moved_tokens", "Tokens copied by relocations", lambda s: s.reclamation.moved_tokens),
    _counter("moved_bytes", "Bytes of K and V copied by relocations, all layers and ranks",
             lambda s: s.reclamation.moved_bytes),
    _counter("reclaimed_blocks",
             "Blocks returned while their request ran, net of the one its next token takes again",
             lambda s: s.reclamation.reclaimed_blocks),
    _counter("relocation_freed_blocks", "Reclaimed blocks that relocation freed",
             lambda s: s.reclamation.relocation_freed_blocks),
    _counter("recycled_slots", "Dead slots that new tokens were written to",
             lambda s: s.reclamation.recycled_slots),
    _counter("moved_then_evicted_tokens", "Tokens evicted soon after they were moved",
             lambda s: s.reclamation.moved_then_evicted_tokens),
    _counter("deferred_rounds", "Rounds that found work but no headroom",
             lambda s: s.reclamation.deferred),
    _counter("deferrals", "Steps in which a closed gate deferred a round, by gate",
             lambda s: [((gate,), n) for gate, n in s.reclamation.deferrals.items()],
             {"gate": DEFERRALS}),
    _counter("shared_skipped_blocks", "Shared blocks with holes that a round skipped",
             lambda s: s.reclamation.shared_skipped_blocks),
    _counter("shared_released_blocks", "Shared blocks released by a holder that has no live token "
             "in them",
             lambda s: s.reclamation.shared_released_blocks),
    _counter("shared_copied_blocks", "Shared blocks emptied by copying",
             lambda s: s.reclamation.shared_copied_blocks),
    # Latency
    _gauge("latency_seconds", "Latency over the engine's last seconds: ttft, inter_token",
           _latency, {"kind": tuple(KINDS), "quantile": tuple(QUANTILES)}, evidence=_tokens,
           samples="tokens", titles=LATENCIES),
    _gauge("goodput_ratio", "Share of the requests ended in the last minute that met every limit "
           "of the setting slo, 0..1", _goodput,
           evidence=lambda s, _: Evidence(0 if s.slo is None else s.slo.count),
           samples="requests", needs="slo", titles={(): "goodput"}),
    _gauge("draft_acceptance_ratio", "Share of the drafts of speculative decoding that were "
           "accepted since the revision began, 0..1; absent before the first "
           f"{wire.FEWEST_DRAFTS:,}", _acceptance, titles={(): "drafts accepted"}),
    _gauge("step_seconds", "Median time between two steps while busy, over the newest 64; absent "
           "before the first", lambda s: s.step_ms / 1000 if s.step_ms else None),
    # Quality: generated tokens scored with the full cache, by group: evicting, control
    _gauge("canary_agreement", "Share of greedy tokens that the full cache ranks first, over the "
           "newest checked requests, by group: evicting, control", _canary_groups("agreement"),
           {"group": GROUPS}, evidence=_checked("agreement", "greedy_count"),
           samples="canaries", needs="canary.share", titles={("evicting",): "agreement"}),
    _fixed("canary_agreement_stderr", "Standard error of canary_agreement",
           _canary_groups("agreement_se"), {"group": GROUPS}),
    _gauge("canary_logprob_lost", "Log-probability of a token when it was sampled minus that under "
           "the full cache, in nats, by group", _canary_groups("logprob_lost"), {"group": GROUPS},
           evidence=_checked("logprob_lost"),
           samples="canaries", needs="canary.share",
           titles={("evicting",): "log-probability lost"}),
    _fixed("canary_logprob_lost_stderr", "Standard error of canary_logprob_lost",
           _canary_groups("logprob_lost_se"), {"group": GROUPS}),
    _gauge("canary_logprob", "Log-probability of a generated token under the full cache, by group",
           _canary_groups("logprob"), {"group": GROUPS}, evidence=_checked("logprob"),
           samples="canaries", needs="canary.share"),
    _fixed("canary_window_requests", "Checked requests in the canary's window, by group",
           _canary_groups("count"), {"group": GROUPS}),
    _counter("canary_requests", "Sampled requests by outcome: checked, dropped, failed, skipped",
             _canary_counts, {"outcome": OUTCOMES}),
    # Cost and correctness
    _counter("plan_seconds", "Time spent planning", lambda s: s.reclamation.plan_us / 1e6),
    _counter("copy_seconds", "Time spent copying", lambda s: s.reclamation.copy_us / 1e6),
    _counter("pack_seconds", "Time spent packing tokens beside holes before attention reads (CPU)",
             lambda s: s.reclamation.pack_us / 1e6),
    _counter("packed_tokens", "Tokens packed before attention reads, counted once a step",
             lambda s: s.reclamation.packed_tokens),
    _gauge("price_seconds", "Measured price, absent before the third sample: hole (packing one "
           "token for one step), copy (moving one), park (copying one to the host), restore "
           "(copying it back), plan (planning one request), probe (probing its decode query)",
           _prices, {"of": PRICED}),
    _gauge("round_seconds", "Estimate of a round run now: saving (packing avoided), cost (copies "
           "and planning)",
           _round, {"side": ("saving", "cost")}),
    _counter("verify_seconds", "Time spent hashing contents before and after copies",
             lambda s: s.invariants.verify_us / 1e6),
    _counter("verified_relocations", "Relocations whose contents were hashed before and after",
             lambda s: s.invariants.verified_relocations),
    _counter("violations", "Invariant violations", lambda s: s.invariants.violations),
    _fixed("config_revision", "Revision of the configuration", lambda s: s.config_revision),
    _counter("shadow_victims_tokens", "Evicted tokens for which a shadow policy was evaluated too; "
             "resets when the shadow changes",
             lambda s: None if s.shadow is None else s.shadow.victims),
    _counter("shadow_agreed_tokens", "Tokens of shadow_victims that the shadow policy would have "
             "evicted too",
             lambda s: None if s.shadow is None else s.shadow.agreed),
)  # fmt: skip
