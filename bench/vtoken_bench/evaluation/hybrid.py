"""A model with windows in every other layer, in memory for half of the clients' requests.

All groups of layers take blocks of one pool, and eviction frees those of full attention alone. Half
the memory is half of the blocks that the requests hold natively, windows included.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Labels,
    Point,
    Run,
    Setting,
    busy_speed,
    figures,
    pick,
    ratios,
    spread,
    stock_of,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.hybrid_model import WINDOW
from vtoken_bench.output import Result, Table
from vtoken_bench.target import HYBRID

CLIENTS = 16
POLICY = "tova"
KEEP = 0.5
SHORT = "half the memory"


def comparisons(setting: Setting) -> list[Comparison]:
    if setting.model != HYBRID:
        return []
    workload = Workload(SHORT, "long-context", 1 / 12, 1.0, 2048)
    longest, mean = workload.longest(), workload.mean()
    blocks = mean / setting.block_size + WINDOW / setting.block_size + 1
    evicting = Point(
        {"situation": SHORT},
        setting.engine(
            stock=False, num_blocks=round(0.5 * CLIENTS * blocks), max_model_len=longest + 1
        ),
        {},
        workload,
        2 * CLIENTS,
        KEEP,
        concurrency=CLIENTS,
    )
    stock = stock_of(evicting)
    ample = replace(
        stock,
        labels={"situation": "ample memory", "variant": NATIVE},
        engine=replace(stock.engine, num_blocks=2 * round(CLIENTS * blocks)),
    )
    points = variant_points((NATIVE, NAIVE, DEFAULTS), stock, evicting, {"name": POLICY})
    return [Comparison(SHORT, [*points, ample], setting.repeats, fresh=True)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table of one model."""
    table = Table(
        f"{model}: windows of {WINDOW} tokens in every other layer, memory for half of what "
        f"{CLIENTS} clients hold, {POLICY} at {KEEP}",
        [
            "memory, variant",
            "tok/s",
            "x native",
            "x naive-evict",
            "blocks in use, all groups",
            "most requests at once",
            "TTFT p50 [s]",
            "preemptions",
        ],
        [],
        ["tok/s: while every client had a request; ratios of the same repeat; [..]: range"],
    )
    native: Labels = {"situation": SHORT, "variant": NATIVE}
    for situation, variant in dict.fromkeys(
        (str(run.labels["situation"]), str(run.labels["variant"])) for run in runs
    ):
        one: Labels = {"situation": situation, "variant": variant}
        chosen = pick(runs, **one)
        gain = ratios(runs, busy_speed, one, native)
        naive = ratios(runs, busy_speed, one, {**native, "variant": NAIVE})
        table.rows.append(
            [
                f"{situation}, {variant}",
                str(spread([busy_speed(run) for run in chosen])),
                None if one == native else str(gain),
                str(naive) if variant == DEFAULTS else None,
                str(figures(chosen, "used_blocks.mean")),
                str(figures(chosen, "most_running")),
                str(spread([run.figure("ttft_ms.p50") / 1e3 for run in chosen])),
                str(figures(chosen, "preemptions")),
            ]
        )
        if variant == DEFAULTS and gain is not None and naive is not None:
            what = f"half the memory beside windows, {POLICY} at {KEEP}: throughput of"
            result.claims += [
                gain.claim("Hybrid", f"{what} native", model, "x", ""),
                naive.claim("Hybrid", f"{what} naive-evict", model, "x", ""),
            ]
    result.tables.append(table)


EXPERIMENT = Experiment(
    "hybrid",
    "memory for half of the requests on a model with windows",
    "not in the paper",
    comparisons,
    report,
    repeats=8,
)
