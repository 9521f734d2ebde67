"""Prometheus metrics of vToken: name, type, help and source of each value.

Metrics have vLLM's prefix and labels (`model_name`, `engine`), so they join with vLLM's metrics.
No label is a block or a request, so the number of series is bounded. Counters start at the engine's
start, `server_` counters at the API server's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vtoken import wire

PREFIX = "vllm:vtoken_"
ENGINE = "0"  # commands reach one engine, and data parallelism is refused

FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Buckets(NamedTuple):
    """The value of a histogram. `cumulative`: upper bound, how many values are at most that."""

    cumulative: Sequence[tuple[str, float]]
    sum: float


Values = Iterable[tuple[tuple[str, ...], float | Buckets]]  # values of the labels, then the value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of one scrape; `status` and `config` are None if the engine does not answer."""

    status: wire.Status | None
    config: wire.ConfigDocument | None
    clients: int = 0
    dropped_events: int = 0
    refused: Mapping[int, int] | None = None
    audit_failing: bool = False
    recorder_faults: int = 0
    recording: bool = False


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family; `name` excludes the prefix and a counter's `_total`."""

    name: str
    kind: str  # of `FAMILIES`
    help: str
    read: Callable[[Snapshot], Values]
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The exposed name."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


def _of_status(read: Callable[[wire.Status], float | Values | None]) -> Callable[..., Values]:
    def values(snapshot: Snapshot) -> Values:
        if snapshot.status is None:
            return ()
        found = read(snapshot.status)
        if found is None:
            return ()
        return [((), float(found))] if isinstance(found, int | float) else found

    return values


def _of_server(read: Callable[[Snapshot], float | Values]) -> Callable[..., Values]:
    def values(snapshot: Snapshot) -> Values:
        found = read(snapshot)
        return [((), float(found))] if isinstance(found, int | float) else found

    return values


def _gauge(
    name: str, help_: str, read: Callable[[wire.Status], float | Values | None], *labels: str
) -> Metric:
    return Metric(name, "gauge", help_, _of_status(read), labels)


def _counter(
    name: str, help_: str, read: Callable[[wire.Status], float | Values | None], *labels: str
) -> Metric:
    return Metric(name, "counter", help_, _of_status(read), labels)


def _of_pressure(
    read: Callable[[wire.MemoryPressure], float],
) -> Callable[[wire.Status], float | None]:
    return lambda status: None if status.pressure is None else read(status.pressure)


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
    for kind in ("ttft", "inter_token"):
        found: wire.Percentiles = getattr(status.latency, kind)
        for quantile in ("50", "95", "99"):
            value_ms = getattr(found, f"p{quantile}_ms")
            if value_ms is not None:
                yield (kind, f"0.{quantile}"), value_ms / 1000


def _prices(status: wire.Status) -> Values:
    if status.prices is not None:
        for name in ("hole", "copy", "plan", "probe"):
            price: wire.Price | None = getattr(status.prices, name)
            if price is not None:
                yield (name,), price.us / 1e6


def _round(status: wire.Status) -> Values:
    if status.prices is not None:
        yield ("saving",), status.prices.saving_us / 1e6
        yield ("cost",), status.prices.cost_us / 1e6


def _canary_groups(name: str) -> Callable[[wire.Status], Values]:
    """The canary field `name` by group; a group without a mean has no sample."""

    def values(status: wire.Status) -> Values:
        if status.canary is not None:
            for group, means in (
                ("evicting", status.canary),
                ("control", status.canary.control),
            ):
                value = getattr(means, name)
                if value is not None:
                    yield (group,), value

    return values


def _canary_counts(status: wire.Status) -> Values:
    if status.canary is not None:
        for outcome in ("checked", "dropped", "failed"):
            yield (outcome,), getattr(status.canary, outcome)
        yield ("skipped",), sum(status.canary.skipped.values())


def _trial(snapshot: Snapshot) -> Values:
    return () if snapshot.config is None else [((), float(snapshot.config.trial is not None))]


METRICS: tuple[Metric, ...] = (
    Metric("up", "gauge", "1 while the engine answers; if 0, its other metrics are absent",
           _of_server(lambda s: s.status is not None)),
    # Is memory the limit?
    _gauge("pool_blocks", "Blocks of the pool", lambda s: s.blocks.total),
    _gauge("blocks", "Blocks by state, which sum to the pool: free, partially_live (some slots "
           "live, some dead or unused), other_used", _states, "state"),
    _gauge("low_utilization_blocks", "Used blocks that are at most half live",
           lambda s: s.blocks.low_utilization),
    _gauge("shared_blocks", "Blocks that two requests or more hold", lambda s: s.blocks.shared),
    _gauge("headroom_blocks", "Fresh blocks that one planning round may take",
           lambda s: s.blocks.headroom),
    _gauge("low_watermark_blocks", "Automatic rounds run at this many free blocks or fewer",
           lambda s: s.fragmentation.low_watermark_blocks),
    _gauge("cause", "1 for the current limit of admission: ok, fragmented or full",
           lambda s: _one_of(("ok", "fragmented", "full"), s.fragmentation.cause), "cause"),
    _gauge("requests", "Requests by state: running, waiting",
           lambda s: [(("running",), s.requests.running), (("waiting",), s.requests.waiting)],
           "state"),
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
    _gauge("spared_tokens", "Live tokens that fixed budgets would have evicted by now",
           _of_pressure(lambda p: p.spared_tokens)),
    _counter("given_tokens", "Evicted tokens that gave way because memory was short",
             _of_pressure(lambda p: p.given_tokens)),
    _counter("preemptions_above_floor", "Preempted requests while a request could have given a "
             "block", _of_pressure(lambda p: p.preemptions_above_floor)),
    Metric("kept_share", "histogram", "Live share of a request's tokens at its end, 0..1, over "
           "finished requests", _of_status(_kept_share)),
    # Why?
    _gauge("tokens", "Slots by state: live (a shared slot counts once), dead (evicted, block still "
           "in use)",
           lambda s: [(("live",), s.tokens.live), (("dead",), s.tokens.dead)], "state"),
    _gauge("f", "Share of held slots without a live token, 0..1", lambda s: s.fragmentation.f),
    _gauge("theta_f", "F above which automatic rounds run, 0..1",
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
           lambda s: [((gate.name,), float(gate.open)) for gate in s.fragmentation.gates], "gate"),
    _gauge("budget_tokens", "Live tokens that a request may keep", lambda s: s.budget_tokens),
    # What does reclamation do?
    _gauge("reclamation", "1 for the current mode: auto, paused or off",
           lambda s: _one_of(("auto", "paused", "off"), s.reclamation.state), "mode"),
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
             lambda s: [((gate,), n) for gate, n in s.reclamation.deferrals.items()], "gate"),
    _counter("shared_skipped_blocks", "Shared blocks with holes that a round skipped",
             lambda s: s.reclamation.shared_skipped_blocks),
    _counter("shared_released_blocks", "Shared blocks released by a holder that has no live token "
             "in them",
             lambda s: s.reclamation.shared_released_blocks),
    _counter("shared_copied_blocks", "Shared blocks emptied by copying",
             lambda s: s.reclamation.shared_copied_blocks),
    # Latency
    _gauge("latency_seconds", "Latency over the engine's last seconds, which guards read: ttft, "
           "inter_token",
           _latency, "kind", "quantile"),
    _gauge("step_seconds", "Mean time between two steps while busy", lambda s: s.step_ms / 1000),
    # Quality: generated tokens scored with the full cache, by group: evicting, control
    _gauge("canary_agreement", "Share of greedy tokens that the full cache ranks first, over the "
           "newest checked requests, by group: evicting, control", _canary_groups("agreement"),
           "group"),
    _gauge("canary_agreement_stderr", "Standard error of canary_agreement",
           _canary_groups("agreement_se"), "group"),
    _gauge("canary_logprob_lost", "Log-probability of a token when it was sampled minus that under "
           "the full cache, in nats, by group", _canary_groups("logprob_lost"), "group"),
    _gauge("canary_logprob_lost_stderr", "Standard error of canary_logprob_lost",
           _canary_groups("logprob_lost_se"), "group"),
    _gauge("canary_logprob", "Log-probability of a generated token under the full cache, by group",
           _canary_groups("logprob"), "group"),
    _gauge("canary_window_requests", "Checked requests in the canary's window, by group",
           _canary_groups("count"), "group"),
    _counter("canary_requests", "Sampled requests by outcome: checked, dropped, failed, skipped",
             _canary_counts, "outcome"),
    # Cost and correctness
    _counter("plan_seconds", "Time spent planning", lambda s: s.reclamation.plan_us / 1e6),
    _counter("copy_seconds", "Time spent copying", lambda s: s.reclamation.copy_us / 1e6),
    _counter("pack_seconds", "Time spent packing tokens beside holes before attention reads (CPU)",
             lambda s: s.reclamation.pack_us / 1e6),
    _counter("packed_tokens", "Tokens packed before attention reads, counted once a step",
             lambda s: s.reclamation.packed_tokens),
    _gauge("price_seconds", "Measured price: hole (packing one token for one step), copy (moving "
           "one token), plan (planning one request), probe (probing one request's decode query)",
           _prices, "of"),
    _gauge("round_seconds", "Estimate of a round run now: saving (packing avoided), cost (copies "
           "and planning)",
           _round, "side"),
    _counter("verify_seconds", "Time spent hashing contents before and after copies",
             lambda s: s.invariants.verify_us / 1e6),
    _counter("verified_relocations", "Relocations whose contents were hashed before and after",
             lambda s: s.invariants.verified_relocations),
    _counter("violations", "Invariant violations", lambda s: s.invariants.violations),
    _gauge("config_revision", "Revision of the configuration", lambda s: s.config_revision),
    Metric("trial_active", "gauge", "1 while a change is on trial", _trial),
    _counter("shadow_victims_tokens", "Evicted tokens for which a shadow policy was evaluated too; "
             "resets when the shadow changes",
             lambda s: None if s.shadow is None else s.shadow.victims),
    _counter("shadow_agreed_tokens", "Tokens of shadow_victims that the shadow policy would have "
             "evicted too",
             lambda s: None if s.shadow is None else s.shadow.agreed),
    # This server process
    Metric("server_stream_clients", "gauge", "Clients of the stream",
           _of_server(lambda s: s.clients)),
    Metric("server_dropped_events", "counter", "Events that clients of the stream have missed",
           _of_server(lambda s: s.dropped_events)),
    Metric("server_refused_calls", "counter", "Refused calls by HTTP status: 401, 403, 429",
           _of_server(lambda s: [((str(k),), v) for k, v in (s.refused or {}).items()]),
           ("status",)),
    Metric("server_audit_failing", "gauge", "1 while the audit log cannot be written to disk",
           _of_server(lambda s: s.audit_failing)),
    Metric("server_recording", "gauge", "1 while this process writes the flight recording",
           _of_server(lambda s: s.recording)),
    Metric("server_recorder_faults", "counter", "Failed writes of the flight recorder",
           _of_server(lambda s: s.recorder_faults)),
)  # fmt: skip


def exposition(snapshot: Snapshot, model_name: str) -> bytes:
    """The metrics in the Prometheus text format."""
    return generate_latest(_Collector(snapshot, model_name))


class _Collector(Collector):
    """The metric families of one snapshot, for `generate_latest`."""

    def __init__(self, snapshot: Snapshot, model_name: str) -> None:
        self._snapshot = snapshot
        self._common = {"model_name": model_name, "engine": ENGINE}

    def collect(self) -> Iterable[Family]:
        for metric in METRICS:
            labels = (*self._common, *metric.labels)
            family = FAMILIES[metric.kind](PREFIX + metric.name, metric.help, labels=labels)
            for own, value in metric.read(self._snapshot):
                given = value if isinstance(value, Buckets) else (float(value),)
                family.add_metric((*self._common.values(), *own), *given)
            yield family
