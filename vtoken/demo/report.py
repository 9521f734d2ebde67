"""The report of a headless run: metrics, verdict, a table for people and JSON for programs.

Averages are over the stream's status messages while at least one request runs. Counters are
differences between the first and the last status of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from vtoken import wire
from vtoken.base.quantities import time_text
from vtoken.demo.exercise import Row
from vtoken.demo.traffic import Answer, TrafficReport

COUNTERS = ("relocations", "moved_tokens", "moved_bytes", "reclaimed_blocks", "recycled_slots")


class Blocks(msgspec.Struct):
    """Blocks in use, averaged over samples with a running request."""

    num_samples: int
    held: float
    without_reclaim: float  # what the same requests would hold under naive-evict
    packed_bound: float  # sum of ceil(live / block_size)


class Stream(msgspec.Struct):
    """What the recorder received."""

    messages: int
    gaps: int
    dropped_events: int
    recording: str


class Report(msgspec.Struct):
    """The result of a headless run. `failures` are sentences; empty means it passed."""

    model: str
    vtoken_version: str
    vllm_version: str
    device: str
    duration_s: float
    traffic: TrafficReport
    blocks: Blocks
    counters: dict[str, int]
    f_mean: float
    switches: int
    largest_reply_ms: float  # from sending a change to the engine's answer
    largest_seen_ms: float  # from sending a change to its revision on the stream
    invariants_checked: int
    violations: int
    preemptions: int
    controls: list[Row]
    stream: Stream
    failures: list[str] = []


def summarize(
    traffic: TrafficReport,
    rows: list[Row],
    switches: int,
    samples: Sequence[wire.Status],
    last: wire.Status,
    stream: Stream,
    *,
    duration_s: float,
) -> Report:
    """The report of a run. `samples`: stream statuses in order; `last`: GET /status at the end."""
    first = samples[0] if samples else last
    busy = [sample for sample in samples if sample.requests.running > 0]
    report = Report(
        model=last.model,
        vtoken_version=last.vtoken_version,
        vllm_version=last.vllm_version,
        device=last.device,
        duration_s=duration_s,
        traffic=traffic,
        blocks=Blocks(
            num_samples=len(busy),
            held=_mean([sample.reclamation.held_blocks for sample in busy]),
            without_reclaim=_mean([s.reclamation.blocks_without_reclaim for s in busy]),
            packed_bound=_mean([sample.reclamation.packed_bound_blocks for sample in busy]),
        ),
        counters={
            name: getattr(last.reclamation, name) - getattr(first.reclamation, name)
            for name in COUNTERS
        },
        f_mean=_mean([sample.fragmentation.f for sample in busy]),
        switches=switches,
        largest_reply_ms=max(
            (row.reply_ms for row in rows if row.step and row.reply_ms), default=0
        ),
        largest_seen_ms=max((row.seen_ms for row in rows if row.seen_ms), default=0),
        invariants_checked=last.invariants.checked,
        violations=last.invariants.violations,
        preemptions=last.requests.preempted - first.requests.preempted,
        controls=rows,
        stream=stream,
    )
    report.failures = list(_failures(report))
    return report


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _failures(report: Report) -> list[str]:
    found = [f"control {row.control}: {row.outcome}" for row in report.controls if not row.ok]
    if report.traffic.failed:
        found.append(f"{report.traffic.failed} requests failed: {report.traffic.failures[0]}")
    if not report.traffic.done:
        found.append("no request finished")
    if report.violations:
        found.append(f"{report.violations} invariant violations")
    if report.stream.gaps:
        found.append(f"{report.stream.gaps} gaps in the stream's seq")
    if not report.blocks.num_samples:
        found.append("the stream had no status while a request ran")
    return found


def save(report: Report, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def show(report: Report, console: Console) -> None:
    """Print the controls, the metrics, sample answers and the verdict."""
    console.print(_controls(report.controls))
    console.print(_metrics(report))
    for answer in samples(report.traffic.answers):
        title = "" if answer.kind == "chat" else f" about {answer.title}"
        size = f"{answer.prompt_tokens:,} tokens in, {answer.output_tokens:,} out"
        for line in (f"question{title}: {answer.question} ({size})", f"answer: {answer.text}", ""):
            console.print(line, markup=False, highlight=False)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)
    verdict = "FAILED" if report.failures else "passed"
    console.print(f"{verdict} after {report.duration_s:.0f} s", markup=False, highlight=False)


def samples(answers: Sequence[Answer]) -> list[Answer]:
    """One of each kind: the first that ended with a stop token, else the first."""
    found = []
    for kind in ("chat", "passage"):
        known = [answer for answer in answers if answer.kind == kind]
        ended = [answer for answer in known if answer.finish_reason == "stop"]
        found += [*ended, *known][:1]
    return found


def _controls(rows: Sequence[Row]) -> Table:
    table = Table("control", "", "step", "reply ms", "seen ms", "F before", "F after", "outcome")
    for name in ("step", "reply ms", "seen ms", "F before", "F after"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for row in rows:
        table.add_row(
            row.control,
            "ok" if row.ok else "FAIL",
            "" if row.step is None else str(row.step),
            _optional(row.reply_ms, ".1f"),
            _optional(row.seen_ms, ".1f"),
            _optional(row.f_before, ".3f"),
            _optional(row.f_after, ".3f"),
            row.outcome,
        )
    return table


def _optional(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _metrics(report: Report) -> Table:
    traffic, blocks = report.traffic, report.blocks
    ttft = _quantiles(traffic.ttft_s)
    latency = _quantiles(traffic.latency_s)
    rows: list[tuple[str, Any]] = [
        ("requests done / failed / cut off at the end", _triple(traffic)),
        ("output tokens", f"{traffic.output_tokens:,}"),
        ("output tokens per second", f"{traffic.output_tokens / (traffic.duration_s or 1):,.0f}"),
        ("time to first token, p50 / p95", ttft),
        ("request latency, p50 / p95", latency),
        ("blocks held, mean", f"{blocks.held:,.1f}"),
        ("  naive-evict would hold", _against(blocks.held, blocks.without_reclaim)),
        ("  packed bound", _against(blocks.held, blocks.packed_bound)),
        *((name.replace("_", " "), f"{report.counters[name]:,}") for name in COUNTERS),
        ("F, mean", f"{report.f_mean:.3f}"),
        ("preemptions", f"{report.preemptions:,}"),
        ("changes applied", f"{report.switches:,}"),
        ("  longest from sending to the engine's answer", time_text(report.largest_reply_ms)),
        ("  longest from sending to the stream", time_text(report.largest_seen_ms)),
        ("invariants checked / violations", f"{report.invariants_checked:,} / {report.violations}"),
        ("stream messages / gaps", f"{report.stream.messages:,} / {report.stream.gaps}"),
    ]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _triple(traffic: TrafficReport) -> str:
    return f"{traffic.done:,} / {traffic.failed:,} / {traffic.cancelled:,}"


def _against(held: float, other: float) -> str:
    if not other:
        return f"{other:,.1f}"
    return f"{other:,.1f} (held is {100 * (held / other - 1):+.1f}%)"


def _quantiles(values: Sequence[float]) -> str:
    """Median and 95th percentile; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return f"{cuts[9]:.2f} / {cuts[18]:.2f} s"
