"""How many requests are resident at once in a fixed pool (paper, figures 8 and 9).

C requests of one shape start together. C is feasible when all of them run from their prefill to
their end without a preemption or a wait. The pools are the paper's in full footprints: 5,427 and
11,519 blocks for requests of 1,020. A second, ample pool shows the blocks that C requests ask for.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken_bench.charts import Chart, Line, Panel
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
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE, PAPER
from vtoken_bench.evaluation.workloads import Workload, budget_tokens
from vtoken_bench.output import Result, Table

KEEP = 0.5
POOLS = (5427 / 1020, 11519 / 1020)  # in full footprints
PAPER_LARGEST = {0: "5 (native), 5 (naive), 8 of 10.6", 1: "11, 11, 22 of 22.5"}
# Around what is expected: the bounds are 5 and 11 in full, twice that packed.
GRIDS = ((4, 5, 6, 8, 9, 10), (10, 11, 12, 17, 20, 22))
SLOW_GRID = (5, 8, 10)
DEMANDED = (2, 5, 8, 11, 16, 22)
INTERVAL_TOKENS = 8  # with the next token, half a block beyond the budget at most
FIXED, AMPLE = "fixed", "ample"


def shape(setting: Setting) -> Workload:
    """One third prompt, two thirds output, as near to the paper's as the time allows."""
    if setting.on_gpu:
        return Workload("long outputs", (4096, 4096))
    return Workload("long outputs", (128, 256) if setting.slow else (256, 512))


def blocks_each(setting: Setting) -> tuple[int, int]:
    """Of one request at its end: in full, and packed."""
    num_prompt, num_new = shape(setting).sizes(1, 0)[0]
    size = setting.block_size
    budget = budget_tokens(num_prompt, num_new, KEEP)
    return -(-(num_prompt + num_new) // size), -(-budget // size)


def comparisons(setting: Setting) -> list[Comparison]:
    workload, (full, _) = shape(setting), blocks_each(setting)
    longest = sum(workload.sizes(1, 0)[0]) + 1
    found = []
    kinds: list[tuple[str, float, tuple[int, ...]]] = [
        (f"{p:.1f} footprints", p, grid) for p, grid in zip(POOLS, GRIDS, strict=True)
    ]
    if setting.quick or setting.slow:
        kinds = [(kinds[0][0], kinds[0][1], SLOW_GRID)]
    for name, footprints, grid in kinds:
        blocks = int(footprints * full)
        points = []
        for count in grid:
            labels: Labels = {"pool": name, "kind": FIXED, "concurrency": count, "blocks": blocks}
            stock, evicting = _pair(setting, workload, labels, blocks, longest, count)
            points += variant_points(
                (NATIVE, NAIVE, PAPER, DEFAULTS),
                replace(stock, stop_on_overflow=True),
                replace(evicting, stop_on_overflow=True),
                {"name": "h2o"},
            )
        found.append(Comparison(name, points, 1 if setting.slow else setting.repeats))
    if not setting.quick and not setting.slow:
        blocks = max(DEMANDED) * full + 2
        points = []
        for count in DEMANDED:
            labels = {"pool": "ample", "kind": AMPLE, "concurrency": count, "blocks": blocks}
            stock, evicting = _pair(setting, workload, labels, blocks, longest, count)
            points += variant_points(
                (NATIVE, NAIVE, PAPER, DEFAULTS), stock, evicting, {"name": "h2o"}
            )
        found.append(Comparison("demand", points, 1))
    return found


def _pair(
    setting: Setting,
    workload: Workload,
    labels: Labels,
    blocks: int,
    longest: int,
    count: int,
) -> tuple[Point, Point]:
    full, packed = blocks_each(setting)
    stock, evicting = (
        Point(
            {**labels, "footprint": full if is_stock else packed},
            setting.engine(stock=is_stock, num_blocks=blocks, max_model_len=longest),
            {} if is_stock else {"interval_tokens": INTERVAL_TOKENS},
            workload,
            count,
            None if is_stock else KEEP,
            concurrency=count,
            sample_every=2,
        )
        for is_stock in (True, False)
    )
    return stock, evicting


def largest(runs: list[Run]) -> int:
    """The largest concurrency up to which every one of the grid was feasible, 0: none."""
    best = 0
    for run in sorted(runs, key=lambda r: r.labels["concurrency"]):
        if run.figures["overflowed"]:
            break
        best = int(run.labels["concurrency"])
    return best


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the frontier of each pool, the demand, and their claims."""
    fixed, ample = pick(runs, kind=FIXED), pick(runs, kind=AMPLE)
    table = Table(
        f"{model}: largest concurrency without preemption or wait, h2o",
        ["pool, variant", "largest C", "bound", "of the bound [%]", "tok/s there"],
        [],
        [
            "bound: pool / footprint at the end, for native in full, for the others packed",
            f"paper: {'; '.join(PAPER_LARGEST.values())} (native, naive-evict, vToken)",
        ],
    )
    pools = list(dict.fromkeys(str(run.labels["pool"]) for run in fixed))
    for number, pool in enumerate(pools):
        for variant in dict.fromkeys(str(r.labels["variant"]) for r in pick(fixed, pool=pool)):
            chosen = pick(fixed, pool=pool, variant=variant)
            found = spread(
                [
                    largest([r for r in chosen if r.repeat == n])
                    for n in sorted({r.repeat for r in chosen})
                ]
            )
            bound = _bound(chosen)
            there = pick(chosen, concurrency=int(found.median))
            table.rows.append(
                [
                    f"{pool}, {variant}",
                    str(found),
                    f"{bound:.1f}",
                    f"{100 * found.median / int(bound):.0f}",
                    str(spread([speed(r) for r in there])) if there else None,
                ]
            )
            result.claims.append(
                found.claim(
                    "Fig. 8",
                    f"largest concurrency, {pool}, {variant}",
                    model,
                    "requests",
                    PAPER_LARGEST[number],
                )
            )
    result.tables.append(table)
    if ample:
        result.tables.append(_demand_table(model, ample))
        result.charts.append(_demand_chart(model, ample))
        most = max(int(run.labels["concurrency"]) for run in ample)
        base = figures(ample, "used_blocks.peak", variant=NATIVE, concurrency=most).median
        for variant in (NAIVE, PAPER, DEFAULTS):
            peak = figures(ample, "used_blocks.peak", variant=variant, concurrency=most)
            share = spread([100 * peak.median / base])
            result.claims.append(
                share.claim(
                    "Fig. 9",
                    f"blocks demanded by {most} requests, {variant}, of native",
                    model,
                    "%",
                    "about 100 (naive), 50 (vToken)",
                )
            )


def _bound(runs: list[Run]) -> float:
    """From the run's own lengths: blocks of the pool over blocks of a request at its end."""
    run = runs[0]
    return float(run.labels["blocks"]) / float(run.labels["footprint"])


def _demand_table(model: str, runs: list[Run]) -> Table:
    counts = sorted({int(run.labels["concurrency"]) for run in runs})
    table = Table(
        f"{model}: blocks in use at the most, in an ample pool",
        ["variant", *[f"C = {count}" for count in counts]],
        [],
    )
    for variant in dict.fromkeys(str(run.labels["variant"]) for run in runs):
        cells: list[str | int | float | None] = [
            int(figures(runs, "used_blocks.peak", variant=variant, concurrency=c).median)
            for c in counts
        ]
        table.rows.append([variant, *cells])
    return table


def _demand_chart(model: str, runs: list[Run]) -> Chart:
    lines = []
    for variant in dict.fromkeys(str(run.labels["variant"]) for run in runs):
        found = sorted(pick(runs, variant=variant), key=lambda r: r.labels["concurrency"])
        lines.append(
            Line(
                variant,
                [float(r.labels["concurrency"]) for r in found],
                [r.figure("used_blocks.peak") for r in found],
                reference=variant == NATIVE,
            )
        )
    panel = Panel("Blocks in use at the most", "requests at once", "blocks", lines)
    return Chart(f"Blocks that so many requests ask for, h2o, {model}", [panel], part=model)


EXPERIMENT = Experiment(
    "capacity",
    "requests that fit a fixed pool; blocks that they ask for",
    "figures 8 and 9, the larger-model check",
    comparisons,
    report,
)
