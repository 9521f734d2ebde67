"""Prometheus metrics: the engine's table (`vtoken.wire.metrics`) and those of the API.

Metrics have vLLM's prefix and labels (`model_name`, `engine`), so they join with vLLM's metrics.
`server_` counters start at the API server's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vtoken import wire
from vtoken.wire import metrics
from vtoken.wire.metrics import Buckets, Metric, Values

PREFIX = "vllm:vtoken_"

FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One engine in one scrape; `status` and `config`, `age_s` old, are None if it is dead or has
    not answered yet. `refused` and `audit_failing` are of the server, and in the snapshot of one of
    its engines.
    """

    status: wire.Status | None
    config: wire.ConfigDocument | None
    engine: int = 0
    alive: bool = True
    age_s: float | None = 0.0
    clients: int = 0
    dropped_events: int = 0
    recorder_faults: int = 0
    recording: bool = False
    refused: Mapping[int, int] | None = None
    audit_failing: bool | None = None


def full_name(metric: Metric[Any]) -> str:
    """The exposed name."""
    return PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")


def _of_engine(metric: Metric[wire.Status]) -> Metric[Snapshot]:
    def values(snapshot: Snapshot) -> Values:
        return () if snapshot.status is None else metric.read(snapshot.status)

    return Metric(metric.name, metric.help, values, metric.labels, metric.kind)


def _refused(snapshot: Snapshot) -> Values:
    return [((str(code),), n) for code, n in (snapshot.refused or {}).items()]


METRICS: tuple[Metric[Snapshot], ...] = (
    Metric("up", "1 while the engine is alive; if 0, its other metrics are absent",
           lambda s: s.alive),
    Metric("age_seconds",
           "Age of the engine's other values; above 1 while a step keeps it from answering",
           lambda s: None if s.status is None else s.age_s),
    *map(_of_engine, metrics.METRICS),
    Metric("trial_active", "1 while a change is on trial",
           lambda s: None if s.config is None else s.config.trial is not None),
    # This server process
    Metric("server_stream_clients", "Clients of the stream", lambda s: s.clients),
    Metric("server_dropped_events", "Events that clients of the stream have missed",
           lambda s: s.dropped_events, kind="counter"),
    Metric("server_refused_calls", "Refused calls by HTTP status: 401, 403, 429",
           _refused, {"status": ("401", "403", "429")}, kind="counter"),
    Metric("server_audit_failing", "1 while the audit log cannot be written to disk",
           lambda s: s.audit_failing),
    Metric("server_recording", "1 while the flight recording is written", lambda s: s.recording),
    Metric("server_recorder_faults", "Failed writes of the flight recorder",
           lambda s: s.recorder_faults, kind="counter"),
)  # fmt: skip


def exposition(snapshots: Sequence[Snapshot], model_name: str) -> bytes:
    """The metrics of all engines in the Prometheus text format."""
    return generate_latest(_Collector(snapshots, model_name))


class _Collector(Collector):
    """The metric families of one scrape, for `generate_latest`."""

    def __init__(self, snapshots: Sequence[Snapshot], model_name: str) -> None:
        self._snapshots = snapshots
        self._model_name = model_name

    def collect(self) -> Iterable[Family]:
        for metric in METRICS:
            labels = ("model_name", "engine", *metric.labels)
            family = FAMILIES[metric.kind](PREFIX + metric.name, metric.help, labels=labels)
            for snapshot in self._snapshots:
                common = (self._model_name, str(snapshot.engine))
                for own, value in metric.read(snapshot):
                    given = value if isinstance(value, Buckets) else (float(value),)
                    family.add_metric((*common, *own), *given)
            yield family
