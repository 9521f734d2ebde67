"""What `vtoken bench client` reports: tables and claims."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import FIXED, POLICY, PRESSURE
from vtoken_bench.evaluation.curve import CLIENTS
from vtoken_bench.evaluation.effects import SHOWN, over_native
from vtoken_bench.evaluation.points import Run, stamp, variants_of
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.output import Result

SPEED = "output_tokens_per_second"
COLUMNS = (
    columns.of_figure(
        "output tok/s",
        SPEED,
        "median [range] of the repeats; tok/s: of the whole run, its end included, when clients "
        "have no further request",
    ),
    columns.of_ratio("x native", SPEED),
    *columns.ANSWERS,
    *[
        columns.of_figure(f"{heading} {p} [ms]", f"{metric}_{p}_ms")
        for heading, metric in (("request", "e2el"), ("TTFT", "ttft"), ("ITL", "itl"))
        for p in ("p50", "p95")
    ],
    columns.of_figure(
        "server CPU [s]",
        "server_cpu_s",
        "server CPU: of all its processes for the run and two requests before it",
    ),
    columns.PREEMPTIONS,
)
RATIO_NOTE = f"{SHOWN}; output tok/s: more is better; latencies and CPU: less is better"
RATIOS = [
    columns.of_ratio(heading, metric, RATIO_NOTE)
    for heading, metric in (
        ("output tok/s", SPEED),
        ("request p50", "e2el_p50_ms"),
        ("request p95", "e2el_p95_ms"),
        ("TTFT p50", "ttft_p50_ms"),
        ("TTFT p95", "ttft_p95_ms"),
        ("TPOT p50", "tpot_p50_ms"),
        ("ITL p95", "itl_p95_ms"),
        ("server CPU", "server_cpu_s"),
    )
]
AGAINST = ((PRESSURE, NAIVE), (FIXED, NAIVE))  # beside every server against native
CLAIMS = (
    (SPEED, "output tokens a second"),
    ("e2el_p95_ms", "request latency p95"),
    ("ttft_p95_ms", "time to first token p95"),
    ("itl_p95_ms", "time between tokens p95"),
    ("server_cpu_s", "server CPU"),
)


def report(result: Result, model: str, runs: Sequence[Run], memory: float) -> None:
    """Adds tables and claims of the runs of one model."""
    names = variants_of(runs)
    title = (
        f"What the client measures: {CLIENTS} clients, memory for {memory:.0%} of the demand, "
        f"{POLICY} at a third of the prompt"
    )
    rows = [columns.Row(name, runs, {"variant": name}) for name in names]
    pairs = [*[(name, NATIVE) for name in names if name != NATIVE], *AGAINST]
    ratios = [
        columns.Row(f"{one} / {other}", runs, {"variant": one}, {"variant": other})
        for one, other in pairs
    ]
    result.tables = [
        columns.table(title, "server", rows, COLUMNS),
        columns.table("Ratios of the same repeat", "ratio", ratios, RATIOS),
    ]
    for name in names:
        for metric, what in CLAIMS if name != NATIVE else ():
            title = f"{memory:.0%} of the demand: {what} of native, {name}"
            ratio = over_native(runs, methodcaller("figure", metric), name)
            result.claims.append(ratio.claim("Real client", title, model))
    result.measured[model] = stamp(runs)
    result.seconds = sum(run.seconds for run in runs)
    result.raw = [dict(run.labels) | {"repeat": run.repeat} | run.figures for run in runs]
