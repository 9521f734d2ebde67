"""What reclaiming costs: its parts, its copies, and what is left in speed (paper, 5.5).

Parts are µs of a step in vToken's own code: planning, starting or making the copies, packing holes
for attention, and the rest on either side (tables, plans, mirrors, publishing). With CUDA copies
run beside the forward; there a third engine waits for each copy, the paper's ablation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vtoken_bench.charts import Bars, Chart, Panel
from vtoken_bench.evaluation.points import (
    UNPACKED,
    Comparison,
    Experiment,
    Point,
    Run,
    Setting,
    figures,
    pick,
    ratios,
    speed,
    spread,
    stock_of,
    unpacked,
    variant_points,
    variants_of,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, PAPER
from vtoken_bench.output import Result, Table

SYNCED = "vToken, paper, waiting for copies"
PARTS: dict[str, Callable[[Run], float]] = {
    "planning": lambda run: run.figure("plan_us"),
    "copies": lambda run: run.figure("copy_us"),
    "packing": lambda run: run.figure("pack_us"),
    "rest, scheduler": lambda run: (
        1e6 * run.figure("hook_seconds.scheduler") - run.figure("plan_us")
    ),
    "rest, worker": lambda run: 1e6 * run.figure("hook_seconds.worker") - run.figure("copy_us"),
}


def comparisons(setting: Setting) -> list[Comparison]:
    workload = setting.chat()
    longest, mean = workload.longest(), workload.mean()
    found = []
    for clients in (8,) if setting.quick else (16,) if setting.slow else (16, 48):
        blocks = round(0.6 * clients * mean / setting.block_size)
        evicting = Point(
            {"clients": clients},
            setting.engine(stock=False, num_blocks=blocks, max_model_len=longest + 1),
            {},
            workload,
            clients if setting.slow else 2 * clients,
            0.5,
            concurrency=clients,
        )
        names = (NAIVE, DEFAULTS, PAPER)
        points = variant_points(names, stock_of(evicting), evicting, {"name": "h2o"})
        if setting.on_gpu:
            paper = points[-1]
            points.append(
                replace(
                    paper,
                    labels={**paper.labels, "variant": SYNCED},
                    engine=replace(paper.engine, copy_sync=True),
                )
            )
        found.append(Comparison(f"{clients} clients", points, setting.repeats, fresh=True))
    return found


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the parts, the price of a copy, and speed against naive-evict."""
    parts = Table(
        f"{model}: µs a step in vToken's own code, h2o, memory for 60%",
        ["clients, variant", "step p50 [ms]", *PARTS, "together [% of the step]"],
        [],
        ["rest: tables, plans, mirrors, slot mapping, publishing"],
    )
    copies = Table(
        f"{model}: copies and what is left in speed, against naive-evict",
        [
            "clients, variant",
            "relocations",
            "moved tokens",
            "µs a token",
            "µs a block",
            "tok/s [x]",
            "packing taken out [x]",
            "p95 between tokens [x]",
        ],
        [],
        [
            "a copy is made in the step that plans it: on the CPU before the step's forward, with "
            "CUDA beside it",
            UNPACKED,
        ],
    )
    panels = []
    for clients in sorted({int(run.labels["clients"]) for run in runs}):
        at = pick(runs, clients=clients)
        variants = variants_of(at)
        for variant in variants:
            chosen = pick(at, variant=variant)
            name = f"{clients}, {variant}"
            part_us = {
                part: spread([of(run) / run.figure("steps") for run in chosen])
                for part, of in PARTS.items()
            }
            step = figures(chosen, "step_ms.p50")
            whole = spread(
                [
                    sum(of(run) for of in PARTS.values()) / (1e4 * run.figure("seconds"))
                    for run in chosen
                ]
            )
            parts.rows.append([name, str(step), *map(str, part_us.values()), str(whole)])
            _copy_row(copies, name, variant, at, result, model)
        panels.append(
            Panel(
                f"{clients} clients",
                "",
                "µs a step",
                bars=[
                    Bars(
                        part,
                        [
                            spread([of(r) / r.figure("steps") for r in pick(at, variant=v)]).median
                            for v in variants
                        ],
                    )
                    for part, of in PARTS.items()
                ],
                groups=variants,
            )
        )
    result.tables += [parts, copies]
    result.charts.append(Chart(f"What reclaiming costs, {model}", panels, part=model))


def _copy_row(
    table: Table, name: str, variant: str, runs: list[Run], result: Result, model: str
) -> None:
    chosen = pick(runs, variant=variant)
    moved = [run for run in chosen if run.figure("moved_tokens")]
    token = spread([r.figure("copy_us") / r.figure("moved_tokens") for r in moved] or [0.0])
    block = spread(
        [r.figure("copy_us") / r.figure("moved_tokens") * r.figure("block_size") for r in moved]
        or [0.0]
    )
    one, naive = {"variant": variant}, {"variant": NAIVE}
    cells: list[str | int | float | None] = [
        name,
        str(figures(chosen, "relocations")),
        str(figures(chosen, "moved_tokens")),
        str(token) if moved else None,
        str(block) if moved else None,
    ]
    if variant == NAIVE:
        table.rows.append([*cells, None, None, None])
        return
    faster = ratios(runs, speed, one, naive)
    unpacked_faster = ratios(runs, unpacked(speed), one, naive)
    later = ratios(runs, lambda run: run.figure("itl_ms.p95"), one, naive)
    table.rows.append([*cells, str(faster), str(unpacked_faster), str(later)])
    for found, what, paper in (
        (faster, "tok/s against naive-evict", "above 1"),
        (unpacked_faster, "tok/s against naive-evict, packing taken out", ""),
        (later, "p95 between tokens against naive-evict", "below 1"),
    ):
        if found is not None:
            result.claims.append(found.claim("5.5", f"{name}: {what}", model, "x", paper))


EXPERIMENT = Experiment(
    "relocation", "what reclaiming costs, by part; copies", "section 5.5", comparisons, report
)
