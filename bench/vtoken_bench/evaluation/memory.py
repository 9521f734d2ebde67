"""What eviction leaves in memory, and what reclaiming gets back (paper, figures 2 and 6).

The same requests with the same budgets run natively, under naive-evict and under vToken. Memory is
looked at between steps. Equal tokens mean equal decisions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vtoken.policies import policy_names
from vtoken_bench.charts import Bars, Chart, Panel
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Point,
    Run,
    Setting,
    Spread,
    figures,
    pick,
    ratios,
    same_tokens,
    spread,
    stock_of,
    variant_points,
)
from vtoken_bench.evaluation.variants import DEFAULTS, EAGER, NAIVE, NATIVE, PAPER
from vtoken_bench.evaluation.workloads import Workload
from vtoken_bench.output import Result, Table

POLICIES = ("h2o", "scissorhands", "random", "tova")  # the paper's three, and one more
CONCURRENCY = 8
KEEP = 0.5
RECLAIMING = (PAPER, DEFAULTS, EAGER)
LONGEST = Workload("8k context", (7168, 512))


def comparisons(setting: Setting) -> list[Comparison]:
    return [_comparison(setting, workload, CONCURRENCY) for workload in setting.workloads()]


def longest(setting: Setting) -> list[Comparison]:
    """Prompts as long as the trained model takes; others have the long context among the others."""
    if not setting.slow:
        return []
    points = [
        point
        for point in _comparison(setting, LONGEST, 2).points
        if point.labels["policy"] in ("h2o", "tova") and point.labels["variant"] != PAPER
    ]
    return [Comparison(LONGEST.name, points, 1)]


def _comparison(setting: Setting, workload: Workload, concurrency: int) -> Comparison:
    """Blocks for all of them, always: who waits or is preempted would be decided anew."""
    longest = workload.longest()
    blocks = (concurrency + 1) * -(-longest // setting.block_size)
    points: list[Point] = []
    for policy in policies(setting):
        evicting = Point(
            {"workload": workload.name, "policy": policy},
            setting.engine(stock=False, num_blocks=blocks, max_model_len=longest + 1),
            {},
            workload,
            concurrency * (1 if setting.slow else 2),
            KEEP,
            concurrency=concurrency,
        )
        names: tuple[str, ...]
        names = (NAIVE, *RECLAIMING) if points else (NATIVE, NAIVE, *RECLAIMING)
        if setting.slow:
            names = tuple(name for name in names if name not in (NATIVE, EAGER))
        points += variant_points(names, stock_of(evicting), evicting, {"name": policy})
    repeats = 1 if setting.slow else min(2, setting.repeats)
    return Comparison(workload.name, points, repeats)


def policies(setting: Setting) -> list[str]:
    known = [name for name in POLICIES if name in policy_names()]
    if setting.slow:
        known.remove("scissorhands")
    return known[:1] if setting.quick else known


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table of one model, the panels of the two figures and their claims."""
    names = list(dict.fromkeys(str(run.labels["workload"]) for run in runs))
    for workload in names:
        found = pick(runs, workload=workload)
        result.tables.append(_table(model, workload, found))
        result.charts.append(_chart(model, workload, found))
        _claims(result, model, workload, found)


def _reduction(runs: list[Run], labels: dict[str, Any]) -> Spread | None:
    """Blocks a request, less than naive-evict in percent."""
    found = ratios(
        runs,
        lambda run: run.figure("memory.blocks_per_request"),
        labels,
        {**labels, "variant": NAIVE},
    )
    return None if found is None else found.change()


def _table(model: str, workload: str, runs: list[Run]) -> Table:
    table = Table(
        f"{model}: blocks that {workload} holds",
        [
            "policy, variant",
            "blocks a request",
            "vs naive [%]",
            "over the packed bound [%]",
            "F [%]",
            "utilisation [%]",
            "blocks at most half full [%]",
            "moved tokens",
            "tokens = naive",
        ],
        [],
    )
    for labels in _labels(runs):
        chosen = pick(runs, **labels)
        name = f"{labels['policy']}, {labels['variant']}"
        if labels["variant"] == NATIVE:
            used = spread([r.figure("used_blocks.mean") / CONCURRENCY for r in chosen])
            table.rows.append([f"{NATIVE} (blocks in use / {CONCURRENCY})", str(used)])
            table.rows[-1] += [None] * (len(table.columns) - 2)
            continue
        memory = {
            "blocks": figures(chosen, "memory.blocks_per_request"),
            "f": spread([100 * r.figure("memory.f") for r in chosen]),
            "live": spread([100 * (1 - r.figure("memory.f")) for r in chosen]),
            "over": spread([100 * r.figure("memory.over_bound_ratio") for r in chosen]),
            "half": spread([100 * sum(r.figures["memory"]["bins_ratio"][:2]) for r in chosen]),
        }
        reduction = None if labels["variant"] == NAIVE else _reduction(runs, labels)
        same = same_tokens(chosen, pick(runs, **{**labels, "variant": NAIVE}))
        table.rows.append(
            [
                name,
                str(memory["blocks"]),
                None if reduction is None else str(reduction),
                str(memory["over"]),
                str(memory["f"]),
                str(memory["live"]),
                str(memory["half"]),
                str(figures(chosen, "moved_tokens")),
                None if labels["variant"] == NAIVE else "yes" if same else "no",
            ]
        )
    table.notes = [
        "median [least .. most] over the repeats, each with other prompts; budgets: half of prompt "
        "and output",
        "packed bound: the blocks that the live tokens would fill; F: dead slots of held blocks",
    ]
    return table


def _labels(runs: list[Run]) -> list[dict[str, Any]]:
    return [dict(pairs) for pairs in dict.fromkeys(tuple(run.labels.items()) for run in runs)]


def _chart(model: str, workload: str, runs: list[Run]) -> Chart:
    groups = list(dict.fromkeys(str(r.labels["policy"]) for r in runs))
    variants = [v for v in (NAIVE, *RECLAIMING) if pick(runs, variant=v)]

    def bars(value: Any) -> list[Bars]:
        found = []
        for variant in variants:
            spreads = [
                spread([value(r) for r in pick(runs, policy=p, variant=variant)]) for p in groups
            ]
            found.append(
                Bars(
                    variant,
                    [s.median for s in spreads],
                    [s.low for s in spreads],
                    [s.high for s in spreads],
                )
            )
        return found

    held = Panel(
        f"{workload}: blocks a request",
        "",
        "blocks",
        bars=bars(lambda r: r.figure("memory.blocks_per_request")),
        groups=groups,
    )
    live = Panel(
        f"{workload}: live share of held slots",
        "",
        "%",
        bars=bars(lambda r: 100 * (1 - r.figure("memory.f"))),
        groups=groups,
    )
    caption = f"Blocks and utilisation of {workload} on {model}, by policy and variant"
    return Chart(caption, [held, live], part=f"{model}-{workload.replace(' ', '-')}")


def _claims(result: Result, model: str, workload: str, runs: list[Run]) -> None:
    naive = pick(runs, variant=NAIVE)
    result.claims += [
        spread([100 * r.figure("memory.f") for r in naive]).claim(
            "Fig. 2", f"F under naive-evict, {workload}, all policies", model, "%", "40 to 60"
        ),
        spread([100 * sum(r.figures["memory"]["bins_ratio"][:2]) for r in naive]).claim(
            "Fig. 2",
            f"blocks at most half full, naive-evict, {workload}",
            model,
            "%",
            "most of them",
        ),
    ]
    for variant in RECLAIMING:
        chosen = pick(runs, variant=variant)
        if not chosen:
            continue
        gains, fewer = [], []
        for run in chosen:
            labels = {**run.labels, "variant": NAIVE}
            base = next(r for r in pick(runs, **labels) if r.repeat == run.repeat)
            gains.append(100 * (base.figure("memory.f") - run.figure("memory.f")))
            path = "memory.blocks_per_request"
            fewer.append(100 * (run.figure(path) / base.figure(path) - 1))
        gain = spread(gains)
        mean = replace(gain, median=sum(gains) / len(gains))
        result.claims += [
            mean.claim(
                "Fig. 6a",
                f"utilisation over naive-evict, {workload}, {variant}, mean",
                model,
                "points",
                "+21.9 and +21.7",
            ),
            spread(fewer).claim(
                "Fig. 6b",
                f"blocks against naive-evict, {workload}, {variant}",
                model,
                "%",
                "-27.2 to -72.3",
            ),
        ]


EXPERIMENT = Experiment(
    "memory",
    "blocks held by native, naive-evict and vToken; utilisation and F",
    "figures 2 and 6",
    comparisons,
    report,
)
LONG = Experiment(
    "long",
    "the same with 7,168 + 512 tokens",
    "figure 2",
    longest,
    report,
)
