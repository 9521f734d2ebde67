"""A fixed budget and eviction under pressure, beside native vLLM, on chats with a fact to find.

    ample      four clients and a pool that holds them: CPU time and tokens beside policy `none`
    saturated  all requests at once, and a pool that holds a quarter of them; also a higher fixed
               budget, which is to keep as much as pressure does
    between    Poisson arrivals at shares of what native vLLM serves when saturated

The clock runs during steps only, see `vtoken_bench.vllm.load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import (
    BUDGET,
    FIXED,
    PRESSURE,
    blocks_each,
    chat_points,
    paired_answers,
    points_shown,
)
from vtoken_bench.evaluation.effects import Effect, Figure, cpu_seconds, speed
from vtoken_bench.evaluation.points import Comparison, Part, Point, Run, Setting, pick
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.grounds.paired import holm
from vtoken_bench.output import Result, Table

REQUESTS, QUICK_REQUESTS = 16, 8
AMPLE_CLIENTS = 4
HIGHER = 0.55
RATES = (0.5, 1.0, 1.5)  # of what native serves when saturated
NONE, FIXED_HIGHER = "vToken, policy none", "vToken, higher fixed budget"
AMPLE, SATURATED = "ample", "saturated"
COLUMNS = (
    columns.of_figure("tok/s", speed, "load: of native's saturated rate; tok/s: median [range]"),
    columns.of_ratio("x native", speed),
    *columns.ANSWERS,
    *columns.LATENCIES,
    columns.of_ratio("TTFT p95 x native", "ttft_ms.p95"),
    columns.KEPT,
    columns.RUNNING,
    columns.PREEMPTIONS,
)


def comparisons(setting: Setting) -> list[Comparison]:
    ample = _points(setting, AMPLE, 3 * AMPLE_CLIENTS, concurrency=AMPLE_CLIENTS)
    none = ample[NATIVE].configured(NONE, {"policy": {"name": "none"}})
    saturated = _saturated(setting)
    higher = saturated[NATIVE].configured(FIXED_HIGHER, BUDGET | {"budget_ratio": HIGHER})
    return [
        Comparison(AMPLE, [none, ample[PRESSURE], ample[FIXED]], setting.repeats),
        Comparison(SATURATED, [*saturated.values(), higher], setting.repeats),
    ]


def _saturated(setting: Setting) -> dict[str, Point]:
    return _points(setting, SATURATED, _requests(setting) // 4)


def _requests(setting: Setting) -> int:
    return QUICK_REQUESTS if setting.quick else REQUESTS


def _points(
    setting: Setting, situation: str, held: int, concurrency: int | None = None
) -> dict[str, Point]:
    """By variant. `held`: whole requests that the pool holds."""
    points = chat_points(
        setting,
        {"situation": situation},
        held * blocks_each(setting),
        _requests(setting),
        concurrency=concurrency,
    )
    return {name: p for p in points if (name := str(p.labels["variant"])) != NAIVE}


def arrivals(setting: Setting, runs: list[Run]) -> list[Comparison]:
    """Open loops at shares of the rate that native serves when saturated."""
    if setting.quick:
        return []
    native = pick(runs, situation=SATURATED, variant=NATIVE)
    served = median([len(r.figures["found"]) / r.figure("seconds") for r in native])
    found = []
    for share in RATES:
        rate, label = float(f"{share * served:.2g}"), f"{share:g}"
        points = [
            replace(point, labels={**point.labels, "situation": label}, rate=rate)
            for point in _saturated(setting).values()
        ]
        found.append(Comparison(f"{label} of native's rate", points, setting.repeats))
    return found


# What is compared with what, under which load, and the goal.
CLAIMS: tuple[tuple[str, Figure, str, str, str], ...] = (
    ("Ample: CPU time of pressure, of policy none", cpu_seconds, AMPLE, NONE, "<= 1.01"),
    (
        "Saturated: tokens a second of pressure, of a fixed budget",
        speed,
        SATURATED,
        FIXED,
        ">= 0.97",
    ),
    *[
        (f"Saturated: {what} of pressure, of {name}", figure, SATURATED, variant, "")
        for variant, name in ((FIXED_HIGHER, "the higher fixed budget"), (NATIVE, "native"))
        for what, figure in (
            ("tokens a second", speed),
            ("median TTFT", lambda run: run.figure("ttft_ms.p50")),
        )
    ],
)


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds what each variant does under each load, the paired answers, and the claims."""
    loads = dict.fromkeys((str(r.labels["situation"]), str(r.labels["variant"])) for r in runs)
    rows = [
        columns.Row(
            f"{situation}, {variant}", pick(runs, situation=situation), {"variant": variant}
        )
        for situation, variant in loads
    ]
    title = f"{model}: native vLLM, a fixed budget and eviction under pressure"
    result.tables.append(columns.table(title, "load, variant", rows, COLUMNS))
    result.tables.append(_answers(model, [row for row in rows if PRESSURE not in row.name]))
    for what, figure, situation, other, goal in CLAIMS:
        here = pick(runs, situation=situation)
        found = Effect.of(here, figure, {"variant": PRESSURE}, {"variant": other})
        if found is not None:
            result.claims.append(found.claim("Pressure", what, model, goal))


def _answers(model: str, others: Sequence[columns.Row]) -> Table:
    """The facts that pressure finds beside those of each other variant under the same load."""
    pairs = [paired_answers(row.runs, {"variant": PRESSURE}, row.labels) for row in others]
    corrected = holm([pair.p_equal() for pair in pairs])
    return Table(
        f"{model}: facts found by pressure and by the others",
        ["load, beside", "only pressure", "only the other", "difference [points]", "p"],
        [
            [row.name, pair.gained, pair.lost, points_shown(pair.difference()), f"{p:.2g}"]
            for row, pair, p in zip(others, pairs, corrected, strict=True)
        ],
        [
            "answers to the same prompts; difference: score interval, 95%, of paired shares; p: "
            "McNemar's exact test, corrected for the number of rows (Holm)"
        ],
    )


PART = Part("pressure", comparisons, report, arrivals, trained=True)
