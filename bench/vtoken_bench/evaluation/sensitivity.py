"""Block size, eviction ratio and theta_F, one at a time (paper, 5.6).

Retained capacity is blocks times block size, a request. Every figure is also given against the
default of its sweep, repeat by repeat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Labels,
    Point,
    Run,
    Setting,
    Spread,
    pick,
    ratios,
    speed,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result, Table

CONCURRENCY = 8
SWEEPS: dict[str, tuple[float, ...]] = {
    "block size": (16, 32, 64, 128),
    "eviction ratio": (0.3, 0.5, 0.7),
    "theta_F": (0.0, 0.1, 0.25, 0.5),
}
DEFAULT = {"block size": 16, "eviction ratio": 0.5, "theta_F": 0.25}
PAPER = {
    "block size": "least capacity at large blocks, best speed at 32",
    "eviction ratio": "capacity falls, throughput rises from 0.3 to 0.7",
    "theta_F": "capacity rises a little, throughput stays",
}
FIGURES = {
    "capacity": lambda run: run.figure("memory.blocks_per_request") * run.figure("block_size"),
    "throughput": speed,
    "p95 between tokens": lambda run: run.figure("itl_ms.p95"),
}


def comparisons(setting: Setting) -> list[Comparison]:
    found = []
    for workload in setting.workloads():
        for sweep, values in SWEEPS.items():
            points: list[Point] = []
            for value in values[:2] if setting.quick else values:
                points += _point(setting, workload, sweep, value)
            found.append(
                Comparison(f"{workload.name}, {sweep}", points, setting.repeats, fresh=True)
            )
    return found


def _point(setting: Setting, workload: Workload, sweep: str, value: float) -> list[Point]:
    size = int(value) if sweep == "block size" else DEFAULT["block size"]
    longest = workload.longest()
    # Memory for all of them, so that the watermark's share of the pool is free and rounds run by
    # theta_F and price.
    tokens = (CONCURRENCY + 1) * longest
    engine = replace(
        setting.engine(stock=False, num_blocks=-(-tokens // int(size)), max_model_len=longest + 1),
        block_size=int(size),
    )
    config: dict[str, Any] = {"low_watermark_blocks": "pool"}
    if sweep == "theta_F":
        config |= {"theta_f": value, "experiment": {"round_rule": "paper"}}
    point = Point(
        {"workload": workload.name, "sweep": sweep, "value": value},
        engine,
        config,
        workload,
        CONCURRENCY * (1 if setting.slow else 2),
        1 - value if sweep == "eviction ratio" else 0.5,
        concurrency=CONCURRENCY,
    )
    return variant_points((DEFAULTS,), point, point, {"name": "h2o"})


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds a table and a chart a workload, and what each sweep does from end to end."""
    for workload in dict.fromkeys(str(run.labels["workload"]) for run in runs):
        found = pick(runs, workload=workload)
        table = Table(
            f"{model}: {workload}, h2o, {CONCURRENCY} requests at a time, against the default",
            ["setting", *FIGURES],
            [],
            ["the default of each sweep is 1; capacity: blocks times block size, a request"],
        )
        panels = []
        for sweep in dict.fromkeys(str(run.labels["sweep"]) for run in found):
            swept = pick(found, sweep=sweep)
            values = [float(v) for v in dict.fromkeys(run.labels["value"] for run in swept)]
            lines = []
            spreads = {
                name: [_against(swept, sweep, value, name) for value in values] for name in FIGURES
            }
            for i, value in enumerate(values):
                cells: list[str | int | float | None] = [f"{sweep} {value:g}"]
                table.rows.append(cells + [str(spreads[name][i]) for name in FIGURES])
            for name, line in spreads.items():
                lines.append(
                    Line(
                        name,
                        values,
                        [s.median for s in line],
                        [s.low for s in line],
                        [s.high for s in line],
                    )
                )
                end = line[-1]
                result.claims.append(
                    end.claim(
                        "5.6",
                        f"{workload}, {sweep} {values[-1]:g} against {DEFAULT[sweep]:g}: {name}",
                        model,
                        "x",
                        PAPER[sweep],
                    )
                )
            panels.append(
                Panel(
                    sweep,
                    sweep,
                    "against the default",
                    lines,
                    x_scale="log" if sweep == "block size" else "linear",
                )
            )
        result.tables.append(table)
        part = f"{model}-{workload.replace(' ', '-')}"
        result.charts.append(Chart(f"Sensitivity, {workload}, {model}", panels, part=part))


def _against(runs: list[Run], sweep: str, value: float, name: str) -> Spread:
    one: Labels = {"value": value}
    default = DEFAULT[sweep]
    if not pick(runs, value=default):
        default = float(runs[0].labels["value"])
    found = ratios(runs, FIGURES[name], one, {"value": default})
    assert found is not None
    return found


EXPERIMENT = Experiment(
    "sensitivity",
    "block size, eviction ratio and theta_F, one at a time",
    "section 5.6",
    comparisons,
    report,
)
