"""What eviction costs where memory is ample: short prompts in a pool that holds everything.

vToken can only lose there. A second process of native vLLM shows the noise between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vtoken_bench.evaluation.effects import Effect
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Labels,
    Point,
    Run,
    Setting,
    figures,
    pick,
    speed,
    spread,
    stock_of,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NATIVE
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result, Table

CLIENTS = 8
POLICY = "tova"
IDLE, AGAIN = "vToken, policy none", "native, again"
GOAL = "<= 3"  # percent


def comparisons(setting: Setting) -> list[Comparison]:
    blocks = 2 * CLIENTS * -(-128 // setting.block_size)
    idle = Point(
        {"variant": IDLE},
        setting.engine(stock=False, num_blocks=blocks, max_model_len=256),
        {"policy": {"name": "none"}},
        Workload("ample memory", (64, 64)),
        CLIENTS * (2 if setting.slow else 8),
        None,
        concurrency=CLIENTS,
        sample_every=0,
    )
    evicting = replace(idle, config={})
    stock = stock_of(idle)
    points = variant_points((NATIVE, DEFAULTS), stock, evicting, {"name": POLICY})
    again = replace(stock, labels={"variant": AGAIN}, engine=replace(stock.engine, copy=1))
    return [Comparison("ample memory", [*points, idle, again], setting.repeats, fresh=True)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table and the claims."""
    table = Table(
        f"{model}: ample memory, 64 + 64 tokens, {CLIENTS} clients",
        ["variant", "tok/s", "x native", "CPU time x native", "between tokens p50 [ms]"],
        [],
        [
            "tok/s: median [range]; ratios: geometric mean of the ratios of the same repeat [95% "
            f"interval, Student t of the mean logarithm]; {AGAIN}: a second process of it"
        ],
    )
    for variant in dict.fromkeys(str(run.labels["variant"]) for run in runs):
        chosen = pick(runs, variant=variant)
        native = variant == NATIVE
        ratios = [None, None] if native else [_ratio(runs, of, variant) for of in (speed, _cpu)]
        table.rows.append(
            [
                variant,
                str(spread([speed(run) for run in chosen])),
                *[None if ratio is None else str(ratio) for ratio in ratios],
                str(figures(chosen, "itl_ms.p50")),
            ]
        )
        if native:
            continue
        lost = spread([100 * (1 - value) for value in _ratio(runs, speed, variant).values])
        what = f"ample memory, short prompts: throughput lost, {variant}"
        goal = "" if variant == AGAIN else GOAL  # that is noise, not vToken's
        result.claims.append(lost.claim("Loss", what, model, "%", "1.0 (indirection alone)", goal))
    result.tables.append(table)


def _ratio(runs: list[Run], figure: Callable[[Run], float], variant: str) -> Effect:
    one: Labels = {"variant": variant}
    found = Effect.of(runs, figure, one, {"variant": NATIVE})
    assert found is not None  # native runs beside every variant
    return found


def _cpu(run: Run) -> float:
    return run.figure("cpu_seconds")


EXPERIMENT = Experiment(
    "loss",
    "what ample memory loses",
    "not in the paper",
    comparisons,
    report,
    repeats=8,
)
