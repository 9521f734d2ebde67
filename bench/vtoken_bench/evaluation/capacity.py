"""How many requests are resident at once in a fixed pool (paper, figures 8 and 9).

C requests of one shape start together. C is feasible when all of them run from their prefill to
their end without a preemption or a wait. The pools are the paper's in full footprints: 5,427 and
11,519 blocks for requests of 1,020. A second, ample pool shows the blocks that C requests ask for.

The largest feasible C is found by bisection over every C, in three engine processes. Its neighbours
are tried too: if a larger C is feasible where a smaller one is not, the smaller one counts, and the
table says so. vToken pays for its own memory: its pool has fewer blocks by what its tables, mirrors
and side buffers hold after a load at the largest C that its blocks alone would allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

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
    spread,
    variant_points,
    variants_of,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE, PAPER
from vtoken_bench.evaluation.workloads import Workload, budget_tokens
from vtoken_bench.output import Result, Table

KEEP = 0.5
POOLS = (5427 / 1020, 11519 / 1020)  # in full footprints
PAPER_LARGEST = ("5 (native), 5 (naive), 8 of 10.6", "11, 11, 22 of 22.5")
DEMANDED = (2, 5, 8, 11, 16, 22)
INTERVAL_TOKENS = 8  # with the next token, half a block beyond the budget at most
OWN, FIXED, AMPLE = "own memory", "fixed", "ample"
VARIANTS = (NATIVE, NAIVE, PAPER, DEFAULTS)
MOST_PROCESSES = 3


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


def pools(setting: Setting) -> dict[str, int]:
    """Blocks of each pool."""
    full, _ = blocks_each(setting)
    chosen = POOLS[:1] if setting.quick or setting.slow else POOLS
    return {f"{pool:.1f} footprints": int(pool * full) for pool in chosen}


def comparisons(setting: Setting) -> list[Comparison]:
    """What vToken holds itself, and the demand in an ample pool."""
    full, packed = blocks_each(setting)
    points = []
    for name, blocks in pools(setting).items():
        at_most = _points(setting, (PAPER, DEFAULTS), name, OWN, blocks, blocks // packed)
        points += [replace(point, own_bytes=True) for point in at_most]
    found = [Comparison(OWN, points, 1)]
    if not setting.quick and not setting.slow:
        blocks = max(DEMANDED) * full + 2
        points = []
        for count in DEMANDED:
            points += _points(setting, VARIANTS, "ample", AMPLE, blocks, count)
        found.append(Comparison("demand", points, 1))
    return found


def bisection(setting: Setting, runs: list[Run]) -> list[Comparison]:
    """The next C of every pool and variant, one process after another."""
    full, packed = blocks_each(setting)
    for repeat in range(min(setting.repeats, MOST_PROCESSES)):
        points = []
        for name, blocks in pools(setting).items():
            for variant in VARIANTS:
                own = 0 if variant == NATIVE else charge(pick(runs, kind=OWN, pool=name))
                tried = pick(runs, kind=FIXED, pool=name, variant=variant)
                fits = {
                    int(run.labels["concurrency"]): not run.figures["overflowed"]
                    for run in tried
                    if run.repeat == repeat
                }
                most = (blocks - own) // (full if variant == NATIVE else packed) + 1
                count = next_count(fits, most)
                if count is None:
                    continue
                (point,) = _points(setting, (variant,), name, FIXED, blocks, count)
                engine = replace(point.engine, num_blocks=blocks - own, copy=repeat)
                points.append(replace(point, engine=engine, stop_on_overflow=True))
        if points:
            name = f"bisection, process {repeat + 1}"
            return [Comparison(name, points, repeat + 1, first=repeat)]
    return []


def charge(runs: list[Run]) -> int:
    """Blocks that vToken's own memory would be; of the variant that holds most."""
    own: list[dict[str, float]] = [run.figures["own_bytes"] for run in runs]
    held = [sum(b[part] for part in ("tables", "mirrors", "buffers")) / b["block"] for b in own]
    return ceil(max(held))


def next_count(fits: Mapping[int, bool], most: int) -> int | None:
    """Which C up to `most` to try next; None if the largest feasible one is known.

    First bisection, then both neighbours of the step from feasible to not.
    """
    high = min((c for c, fit in fits.items() if not fit), default=most + 1)
    low = max((c for c, fit in fits.items() if fit and c < high), default=0)
    if high - low > 1:
        return (low + high) // 2
    return next((c for c in (low - 1, high + 1) if 1 <= c <= most and c not in fits), None)


def is_monotone(runs: list[Run]) -> bool:
    """Whether no C is feasible above one that is not, within a process."""
    return all(
        not run.figures["overflowed"] or other.figures["overflowed"]
        for run in runs
        for other in runs
        if run.repeat == other.repeat
        and int(run.labels["concurrency"]) < int(other.labels["concurrency"])
    )


def _points(
    setting: Setting, variants: tuple[str, ...], pool: str, kind: str, blocks: int, count: int
) -> list[Point]:
    workload = shape(setting)
    longest = sum(workload.sizes(1, 0)[0]) + 1
    labels: Labels = {"pool": pool, "kind": kind, "concurrency": count, "blocks": blocks}
    stock, evicting = _pair(setting, workload, labels, blocks, longest, count)
    return variant_points(variants, stock, evicting, {"name": "h2o"})


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
        [
            "pool, variant",
            "largest C",
            "bound",
            "of the bound [%]",
            "charged [blocks]",
        ],
        [],
        [
            "bound: the whole pool / footprint at the end, native's in full, the others' packed",
            "charged: blocks that the pool lacks for vToken's tables, mirrors and side buffers",
            f"paper: {'; '.join(PAPER_LARGEST)} (native, naive-evict, vToken)",
        ],
    )
    names = list(dict.fromkeys(str(run.labels["pool"]) for run in fixed))
    for number, pool in enumerate(names):
        for variant in variants_of(pick(fixed, pool=pool)):
            chosen = pick(fixed, pool=pool, variant=variant)
            found = spread(
                [
                    largest([r for r in chosen if r.repeat == n])
                    for n in sorted({r.repeat for r in chosen})
                ]
            )
            bound = _bound(chosen)
            own = charge(pick(runs, kind=OWN, pool=pool))
            table.rows.append(
                [
                    f"{pool}, {variant}",
                    str(found) + ("" if is_monotone(chosen) else ", a larger one fits"),
                    f"{bound:.1f}",
                    f"{100 * found.median / int(bound):.0f}",
                    0 if variant == NATIVE else own,
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
    for variant in variants_of(runs):
        cells: list[str | int | float | None] = [
            int(figures(runs, "used_blocks.peak", variant=variant, concurrency=c).median)
            for c in counts
        ]
        table.rows.append([variant, *cells])
    return table


def _demand_chart(model: str, runs: list[Run]) -> Chart:
    lines = []
    for variant in variants_of(runs):
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
    bisection,
)
