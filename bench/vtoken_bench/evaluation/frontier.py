"""Throughput under a latency bound (paper, figure 7).

A closed-loop scan over the number of clients, in a pool that holds half of what the most clients
would need natively. The bound is the paper's: 1.05 times the p95 of naive-evict with 8 clients,
here between two tokens of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.evaluation.effects import SHOWN, Effect
from vtoken_bench.evaluation.points import (
    UNPACKED,
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
    unpacked,
    variant_points,
    variants_of,
)
from vtoken_bench.evaluation.variants import DEFAULTS, NAIVE, NATIVE
from vtoken_bench.output import Result, Table

POLICIES = ("h2o", "scissorhands", "random")
SLOW_POLICY = "tova"
KEEP = 0.5
C_REF, SLACK = 8, 1.05
SHARE_OF_THE_MOST = 0.5  # the pool, of what the most clients need at their longest
PAPER_GAIN = "1.099 to 1.373 x, Scissorhands to 2.037"


def comparisons(setting: Setting) -> list[Comparison]:
    counts = clients(setting)
    found = []
    for workload in setting.workloads():
        longest, mean = workload.longest(), workload.mean()
        blocks = round(SHARE_OF_THE_MOST * max(counts) * mean / setting.block_size)
        blocks = max(blocks, -(-longest // setting.block_size) + 2)
        points: list[Point] = []
        for count in counts:
            evicting = Point(
                {"workload": workload.name, "clients": count},
                setting.engine(stock=False, num_blocks=blocks, max_model_len=longest + 1),
                {},
                workload,
                max(3 * count // 2, 16),
                KEEP,
                concurrency=count,
            )
            stock = stock_of(evicting)
            points += variant_points((NATIVE,), stock, evicting, {})
            for policy in policies(setting):
                named = replace(evicting, labels={**evicting.labels, "policy": policy})
                points += variant_points((NAIVE, DEFAULTS), stock, named, {"name": policy})
        found.append(Comparison(workload.name, points, setting.repeats, fresh=True))
    return found


def clients(setting: Setting) -> tuple[int, ...]:
    if setting.quick:
        return (4, 8)
    return (4, 8, 12) if setting.slow else (4, 8, 16)


def policies(setting: Setting) -> tuple[str, ...]:
    if setting.slow:
        return (SLOW_POLICY,)
    return POLICIES[:1] if setting.quick else POLICIES


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the scan, the selected points and their claims, for each workload and policy."""
    names = dict.fromkeys(
        (str(r.labels["workload"]), str(r.labels["policy"])) for r in runs if "policy" in r.labels
    )
    selected = Table(
        f"{model}: throughput at p95 between tokens within {SLACK} of naive-evict's at "
        f"{C_REF} clients",
        [
            "workload, policy, variant",
            "bound ms",
            "clients",
            "tok/s",
            "x naive-evict",
            "the same, packing taken out",
            "x native",
        ],
        [],
        [
            f"tok/s: median of the fastest number of clients within the bound; ratios: {SHOWN}",
            UNPACKED,
            f"paper: x naive-evict {PAPER_GAIN}",
        ],
    )
    panels: list[Panel] = []
    for workload, policy in names:
        found = pick(runs, workload=workload, variant=NATIVE)
        found += pick(runs, workload=workload, policy=policy)
        result.tables.append(_scan(model, workload, policy, found))
        panels.append(_panel(workload, policy, found))
        _select(result, selected, model, f"{workload}, {policy}", found)
    result.tables += [selected, _fragmentation(model, runs)]
    result.charts.append(
        Chart(f"Throughput and p95 between tokens by clients, {model}", panels, part=model)
    )


def best_under(runs: list[Run], bound_ms: float) -> tuple[int, float] | None:
    """Clients and tokens a second of the fastest point within the bound; None: there is none."""
    fit = []
    for count in dict.fromkeys(int(run.labels["clients"]) for run in runs):
        chosen = pick(runs, clients=count)
        if figures(chosen, "itl_ms.p95").median <= bound_ms:
            fit.append((spread([speed(run) for run in chosen]).median, count))
    return max(fit)[::-1] if fit else None


def _select(result: Result, table: Table, model: str, name: str, runs: list[Run]) -> None:
    """Adds a row a variant, and the claims of vToken.

    Medians choose the points; a ratio compares them within one repeat.
    """
    reference = pick(runs, variant=NAIVE, clients=C_REF)
    if not reference:
        return
    bound = SLACK * figures(reference, "itl_ms.p95").median
    best = {
        variant: best_under(pick(runs, variant=variant), bound) for variant in variants_of(runs)
    }
    points: dict[str, Labels] = {
        variant: {"variant": variant, "clients": found[0]}
        for variant, found in best.items()
        if found
    }

    def ratio(variant: str, other: str, figure: Callable[[Run], float]) -> Effect | None:
        if variant == other or not {variant, other} <= points.keys():
            return None
        return Effect.of(runs, figure, points[variant], points[other])

    for variant, found in best.items():
        gains = {
            "of naive-evict": ratio(variant, NAIVE, speed),
            "of naive-evict, packing taken out": ratio(variant, NAIVE, unpacked(speed)),
            "of native": ratio(variant, NATIVE, speed),
        }
        clients, tokens = found or (None, None)
        cells = [None if gain is None else str(gain) for gain in gains.values()]
        table.rows.append([f"{name}, {variant}", bound, clients, tokens, *cells])
        if variant == DEFAULTS:
            result.claims += [
                gain.claim(
                    "Fig. 7",
                    f"{name}: throughput under the bound {what}, {variant}",
                    model,
                    paper=PAPER_GAIN if what == "of naive-evict" else "",
                )
                for what, gain in gains.items()
                if gain is not None
            ]


def _scan(model: str, workload: str, policy: str, runs: list[Run]) -> Table:
    counts = sorted({int(run.labels["clients"]) for run in runs})
    table = Table(
        f"{model}: {workload}, {policy}: tok/s | p95 ms between tokens | p95 s of a request",
        ["variant", *[f"{count} clients" for count in counts]],
        [],
        ["* somebody was preempted or waited; medians over the repeats"],
    )
    for variant in variants_of(runs):
        cells: list[str | int | float | None] = [variant]
        for count in counts:
            chosen = pick(runs, variant=variant, clients=count)
            mark = "*" if any(run.figures["overflowed"] for run in chosen) else ""
            tokens = spread([speed(run) for run in chosen]).median
            gap = figures(chosen, "itl_ms.p95").median
            whole = figures(chosen, "e2e_ms.p95").median / 1e3
            cells.append(f"{tokens:.0f} | {gap:.1f} | {whole:.1f}{mark}")
        table.rows.append(cells)
    return table


def _fragmentation(model: str, runs: list[Run]) -> Table:
    """Figure 2 by batch size: how full the blocks of naive-evict are."""
    naive = pick(runs, variant=NAIVE)
    counts = sorted({int(run.labels["clients"]) for run in naive})
    table = Table(
        f"{model}: naive-evict, F [%] | blocks at most half full [%]",
        ["workload, policy", *[f"{count} clients" for count in counts]],
        [],
    )
    for workload, policy in dict.fromkeys(
        (str(r.labels["workload"]), str(r.labels["policy"])) for r in naive
    ):
        cells: list[str | int | float | None] = [f"{workload}, {policy}"]
        for count in counts:
            found = pick(naive, workload=workload, policy=policy, clients=count)
            wasted = spread([100 * run.figure("memory.f") for run in found])
            half = spread([100 * sum(run.figures["memory"]["bins_ratio"][:2]) for run in found])
            cells.append(f"{wasted.median:.0f} | {half.median:.0f}")
        table.rows.append(cells)
    return table


def _panel(workload: str, policy: str, runs: list[Run]) -> Panel:
    lines = []
    for variant in variants_of(runs):
        found = pick(runs, variant=variant)
        counts = sorted({int(run.labels["clients"]) for run in found})
        spreads = [spread([speed(r) for r in pick(found, clients=c)]) for c in counts]
        lines.append(
            Line(
                variant,
                [float(c) for c in counts],
                [s.median for s in spreads],
                [s.low for s in spreads],
                [s.high for s in spreads],
                reference=variant == NATIVE,
            )
        )
    return Panel(f"{workload}, {policy}", "clients", "output tokens a second", lines)


EXPERIMENT = Experiment(
    "frontier",
    "throughput under a latency bound, by clients",
    "figure 7",
    comparisons,
    report,
    repeats=8,
)
