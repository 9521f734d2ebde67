"""What `vtoken bench client` reports: tables, chart and claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vtoken_bench.charts import Bars, Chart, Panel
from vtoken_bench.evaluation.answers import (
    FIXED,
    POLICY,
    PRESSURE,
    answer_cells,
    paired_answers,
    points_shown,
)
from vtoken_bench.evaluation.curve import CLIENTS
from vtoken_bench.evaluation.effects import SHOWN, Effect
from vtoken_bench.evaluation.points import (
    Labels,
    Run,
    figures,
    pick,
    spread,
    stamp,
    variants_of,
)
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.output import Result, Table

SPEED = "output_tokens_per_second"
LATENCIES = (  # metric, heading, milliseconds in its unit
    ("ttft_p50_ms", "TTFT p50 [s]", 1e3),
    ("ttft_p95_ms", "TTFT p95 [s]", 1e3),
    ("ttft_p99_ms", "TTFT p99 [s]", 1e3),
    ("tpot_p50_ms", "TPOT p50 [ms]", 1.0),
    ("tpot_p95_ms", "TPOT p95 [ms]", 1.0),
    ("itl_p50_ms", "ITL p50 [ms]", 1.0),
    ("itl_p95_ms", "ITL p95 [ms]", 1.0),
    ("itl_p99_ms", "ITL p99 [ms]", 1.0),
)
RATIOS = (
    (SPEED, "output tok/s"),
    ("e2el_p50_ms", "request p50"),
    ("e2el_p95_ms", "request p95"),
    ("ttft_p50_ms", "TTFT p50"),
    ("ttft_p95_ms", "TTFT p95"),
    ("tpot_p50_ms", "TPOT p50"),
    ("itl_p95_ms", "ITL p95"),
    ("server_cpu_s", "server CPU"),
)
AGAINST = ((PRESSURE, NAIVE), (FIXED, NAIVE))  # beside every server against native
CLAIMS = (
    (SPEED, "output tokens a second"),
    ("e2el_p95_ms", "request latency p95"),
    ("ttft_p95_ms", "time to first token p95"),
    ("itl_p95_ms", "time between tokens p95"),
    ("server_cpu_s", "server CPU"),
)


def report(result: Result, model: str, runs: Sequence[Run], memory: float) -> None:
    """Adds tables, sentence, chart and claims of the runs of one model."""
    names = variants_of(runs)
    result.tables = [
        _metrics_table(runs, names, memory),
        _latencies_table(runs, names),
        ratios_table(runs, names),
    ]
    result.sentences = [sentence(model, runs, memory)]
    result.charts = [_chart(runs, names, memory)]
    for name in names:
        for metric, what in CLAIMS if name != NATIVE else ():
            title = f"{memory:.0%} of the demand: {what} of native, {name}"
            result.claims.append(
                ratio(runs, metric, name, NATIVE).claim("Real client", title, model)
            )
    result.measured[model] = stamp(runs)
    result.seconds = sum(run.seconds for run in runs)
    result.raw = [dict(run.labels) | {"repeat": run.repeat} | run.figures for run in runs]


def ratio(runs: Sequence[Run], metric: str, one: str, other: str) -> Effect:
    """The metric of a server over another one's, in the same repeat."""
    found = Effect.of(runs, _metric(metric), {"variant": one}, {"variant": other})
    assert found is not None  # every repeat has all servers
    return found


def _metric(name: str) -> Callable[[Run], float]:
    return lambda run: run.figure(name)


def _metrics_table(runs: Sequence[Run], names: Sequence[str], memory: float) -> Table:
    table = Table(
        f"What the client measures: {CLIENTS} clients, memory for {memory:.0%} of the demand, "
        f"{POLICY} at a third of the prompt",
        [
            "server",
            "requests/s",
            "output tok/s",
            "x native",
            "facts found [%]",
            "difference to native [points]",
            "request p50 [s]",
            "request p95 [s]",
            "server CPU [s]",
            "preemptions",
        ],
        [],
        [
            "median [range] of the repeats; tok/s: of the whole run, its end included, when "
            f"clients have no further request; x native: {SHOWN}",
            "facts found: exact 95% interval; difference: answers to the same prompts, Tango's 95% "
            "interval",
            "server CPU: of all its processes for the run and two requests before it",
        ],
    )
    native: Labels = {"variant": NATIVE}
    for name in names:
        one: Labels = {"variant": name}
        chosen = pick(runs, **one)
        table.rows.append(
            [
                name,
                str(figures(chosen, "requests_per_second")),
                str(figures(chosen, SPEED)),
                None if name == NATIVE else str(ratio(runs, SPEED, name, NATIVE)),
                *answer_cells(runs, one, native),
                *[
                    str(spread([run.figure(f"e2el_{p}_ms") / 1e3 for run in chosen]))
                    for p in ("p50", "p95")
                ],
                str(figures(chosen, "server_cpu_s")),
                str(figures(chosen, "preemptions")),
            ]
        )
    return table


def _latencies_table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    headings = [heading for _, heading, _ in LATENCIES]
    table = Table("First token, and between tokens", ["server", *headings], [])
    for name in names:
        chosen = pick(runs, variant=name)
        cells = [
            str(spread([run.figure(metric) / unit for run in chosen]))
            for metric, _, unit in LATENCIES
        ]
        table.rows.append([name, *cells])
    table.notes.append("median [range] of the repeats")
    return table


def ratios_table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    table = Table(
        "Ratios of the same repeat",
        ["ratio", *[heading for _, heading in RATIOS]],
        [],
        [
            "geometric mean [95% interval, Student t of the mean logarithm]; output tok/s: more is "
            "better; latencies and CPU: less is better"
        ],
    )
    pairs = [(name, NATIVE) for name in names if name != NATIVE]
    for one, other in (*pairs, *AGAINST):
        cells = [str(ratio(runs, metric, one, other)) for metric, _ in RATIOS]
        table.rows.append([f"{one} / {other}", *cells])
    return table


def sentence(model: str, runs: Sequence[Run], memory: float) -> str:
    """What pressure, the default, does under the client; an interval with 1 in it shows nothing."""
    gain = ratio(runs, SPEED, PRESSURE, NATIVE)
    pairs = paired_answers(runs, {"variant": PRESSURE}, {"variant": NATIVE})
    text = (
        f"**{model}**, {PRESSURE}, memory for {memory:.0%} of the demand: {gain} times native's "
        f"tokens a second over HTTP, facts found {points_shown(pairs.difference())} points."
    )
    return text + " No gain is shown." * (gain.verdict() != "more")


def _chart(runs: Sequence[Run], names: Sequence[str], memory: float) -> Chart:
    panels = []
    for metric, title, unit, label in (
        (SPEED, "Throughput", 1.0, "output tokens/s"),
        ("e2el_p95_ms", "Request latency, p95", 1e3, "s"),
        ("ttft_p95_ms", "Time to first token, p95", 1e3, "s"),
    ):
        bars = []
        for name in names:
            found = spread([run.figure(metric) / unit for run in pick(runs, variant=name)])
            bars.append(Bars(name, [found.median], [found.low], [found.high]))
        panels.append(Panel(title, "", label, bars=bars, groups=[f"{CLIENTS} clients"]))
    caption = (
        f"vllm bench serve, {CLIENTS} clients, memory for {memory:.0%} of the demand. "
        "Whiskers: the repeats."
    )
    return Chart(caption, panels)
