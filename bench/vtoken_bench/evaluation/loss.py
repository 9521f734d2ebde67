"""What eviction costs where memory is ample: short prompts in a pool that holds everything.

vToken can only lose there. A second process of native vLLM shows the noise between processes.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken_bench.evaluation.effects import SHOWN, over_native
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Point,
    Run,
    Setting,
    cpu_seconds,
    figures,
    pick,
    speed,
    spread,
    stock_of,
    variant_points,
    variants_of,
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
        [f"tok/s: median [range]; ratios: {SHOWN}; {AGAIN}: a second process of it"],
    )
    for variant in variants_of(runs):
        chosen = pick(runs, variant=variant)
        shown = str(spread([speed(run) for run in chosen]))
        between = str(figures(chosen, "itl_ms.p50"))
        if variant == NATIVE:
            table.rows.append([variant, shown, None, None, between])
            continue
        speeds, cpu = (over_native(runs, figure, variant) for figure in (speed, cpu_seconds))
        table.rows.append([variant, shown, str(speeds), str(cpu), between])
        lost = spread([100 * (1 - value) for value in speeds.values])
        what = f"ample memory, short prompts: throughput lost, {variant}"
        goal = "" if variant == AGAIN else GOAL  # that is noise, not vToken's
        result.claims.append(lost.claim("Loss", what, model, "%", "1.0 (indirection alone)", goal))
    result.tables.append(table)


EXPERIMENT = Experiment(
    "loss",
    "what ample memory loses",
    "not in the paper",
    comparisons,
    report,
    repeats=8,
)
