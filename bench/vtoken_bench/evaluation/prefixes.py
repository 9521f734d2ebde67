"""Reclaiming beside vLLM's prefix cache (paper, table 1).

Groups of requests share half of their prompt. Prefix caching is on everywhere, so a difference
comes from reclaiming and not from hits.
"""

from __future__ import annotations

from dataclasses import replace

from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Point,
    Run,
    Setting,
    figures,
    pick,
    ratios,
    same_tokens,
    speed,
    variants_of,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, PAPER, VARIANTS
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result, Table

DEGREES = (1, 2, 4, 8)
REQUESTS = 8
PAPER_TABLE = {
    1: "-28.6, -2.9, +2.9",
    2: "-33.0, +76.1, -40.2",
    4: "-32.3, +97.2, -40.9",
    8: "-42.2, +146.5, -47.8",
}
# As in the paper rounds run by theta_F; the pool is half of what the requests need in full.
TIERS = {PAPER: "skip", DEFAULTS: "index", f"{DEFAULTS}, copy": "copy"}


def comparisons(setting: Setting) -> list[Comparison]:
    size = (8192 + 8192, 1024) if setting.on_gpu else (512, 128) if setting.slow else (1024, 256)
    workload = Workload("shared prefix", size)
    size_blocks = -(-sum(size) // setting.block_size)
    found = []
    for degree in DEGREES[1::2] if setting.quick or setting.slow else DEGREES:
        engine = replace(
            setting.engine(
                stock=False, num_blocks=REQUESTS * size_blocks, max_model_len=sum(size) + 1
            ),
            prefix_caching=True,
        )
        point = Point(
            {"degree": degree},
            engine,
            {},
            workload,
            REQUESTS,
            0.5,
            concurrency=REQUESTS,
            shared=(degree, size[0] // 2),
        )
        points = [_with(point, NAIVE, VARIANTS[NAIVE])]
        for name, tier in TIERS.items():
            base = VARIANTS.get(name, {})
            points.append(_with(point, name, base | {"prefix_sharing": tier}))
        repeats = 1 if setting.slow else setting.repeats
        found.append(Comparison(f"degree {degree}", points, repeats, fresh=True))
    return found


def _with(point: Point, variant: str, config: dict[str, object]) -> Point:
    config = config | {"policy": {"name": "h2o"}, "low_watermark_blocks": "pool"}
    return replace(point, labels={**point.labels, "variant": variant}, config=config)


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table, the paper's line beside ours, and a claim a degree."""
    table = Table(
        f"{model}: {REQUESTS} requests that share half of their prompts, h2o, prefix caching on",
        [
            "degree, variant",
            "blocks in use",
            "vs naive [%]",
            "tok/s vs naive [%]",
            "p95 between tokens vs naive [%]",
            "paper: blocks, tok/s, p95 [%]",
            "moved tokens",
            "blocks reclaimed",
            "shared skipped",
            "tokens = naive",
        ],
        [],
        [
            "a block of several requests counts once",
            "the pool holds all requests under naive-evict too: nobody waits, and throughput shows "
            "what reclaiming costs, not what memory gains",
        ],
    )
    for degree in sorted({int(run.labels["degree"]) for run in runs}):
        at = pick(runs, degree=degree)
        naive = pick(at, variant=NAIVE)
        for variant in variants_of(at):
            chosen = pick(at, variant=variant)
            cells: list[str | int | float | None] = [
                f"{degree}, {variant}",
                str(figures(chosen, "used_blocks.mean")),
            ]
            if variant == NAIVE:
                table.rows.append(cells + [None] * 8)
                continue
            changes = []
            for figure in (
                lambda run: run.figure("used_blocks.mean"),
                speed,
                lambda run: run.figure("itl_ms.p95"),
            ):
                ratio = ratios(at, figure, {"variant": variant}, {"variant": NAIVE})
                assert ratio is not None  # naive-evict ran beside it
                changes.append(ratio.change())
            table.rows.append(
                [
                    *cells,
                    *map(str, changes),
                    PAPER_TABLE[degree] if variant == PAPER else None,
                    str(figures(chosen, "moved_tokens")),
                    str(figures(chosen, "reclaimed_blocks")),
                    str(figures(chosen, "shared_skipped_blocks")),
                    "yes" if same_tokens(chosen, naive) else "no",
                ]
            )
            result.claims.append(
                changes[0].claim(
                    "Table 1",
                    f"blocks vs naive, sharing {degree}, {variant}",
                    model,
                    "%",
                    PAPER_TABLE[degree].split(",")[0],
                )
            )
    result.tables.append(table)


EXPERIMENT = Experiment(
    "prefixes", "reclaiming beside vLLM's prefix cache", "table 1", comparisons, report
)
