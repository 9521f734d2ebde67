"""How much memory has to be missing before eviction gains, and what it costs in answers there.

The pool holds from all of what the clients' requests need down to a quarter. Requests are chats
with a fact to find, so tokens a second, waiting, residency and facts found are of the same outputs.
The budget is a third of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.answers import (
    FIXED,
    POLICY,
    PRESSURE,
    answer_cells,
    blocks_each,
    chat_points,
    found,
    kept,
    paired_answers,
    points_shown,
)
from vtoken_bench.evaluation.effects import SHOWN, Effect, over_native
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
    spread,
    unpacked,
    variants_of,
)
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.grounds.paired import share
from vtoken_bench.output import Result, Table

# Speeds are of the time until the last request arrives, when ten have ended. Eight repeats give 144
# pairs of answers.
CLIENTS, REQUESTS, QUICK_REQUESTS = 8, 18, 10
MEMORY = 0.45  # the pool that the causes and the client over HTTP have too
POOLS = (1.0, 0.7, MEMORY, 0.25)  # of what the clients' requests need at their end
QUICK_POOLS = (1.0, 0.25)
NAIVE_GOAL = ">= 1.3"


def comparisons(setting: Setting) -> list[Comparison]:
    return [
        Comparison(
            f"{pool:.0%} of the demand",
            points_at(setting, {"pool": pool}, pool),
            setting.repeats,
            fresh=True,
        )
        for pool in (QUICK_POOLS if setting.quick else POOLS)
    ]


def points_at(setting: Setting, labels: Labels, pool: float) -> list[Point]:
    """Every variant with memory for the share `pool` of the demand; native is the first."""
    blocks = round(pool * CLIENTS * blocks_each(setting))
    requests = QUICK_REQUESTS if setting.quick else REQUESTS
    return chat_points(setting, labels, blocks, requests, concurrency=CLIENTS)


def gain(runs: Sequence[Run], pool: float, variant: str) -> Effect:
    """Tokens a second of native's, while every client had a request."""
    return over_native(pick(runs, pool=pool), busy_speed, variant)


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table, the sentence, the chart and the claims."""
    title = (
        f"{model}: memory from all of the demand of {CLIENTS} clients to a quarter of it, {POLICY} "
        "at a third of the prompt"
    )
    result.tables.append(table(title, runs))
    for pool in _pools(runs):
        result.claims += claims(model, runs, pool)
        here = pick(runs, pool=pool)
        gained = Effect.of(here, unpacked(busy_speed), {"variant": FIXED}, {"variant": NAIVE})
        assert gained is not None  # both are in every repeat
        what = f"{pool:.0%} of the demand: throughput of naive-evict, packing taken out, {FIXED}"
        result.claims.append(
            gained.claim("Curve", what, model, NAIVE_GOAL if pool == MEMORY else "")
        )
    result.sentences += [f"**{model}**, {sentence(runs, name)}" for name in (PRESSURE, FIXED)]
    result.charts.append(_chart(model, runs))


def _pools(runs: Sequence[Run]) -> list[float]:
    return list(dict.fromkeys(float(run.labels["pool"]) for run in runs))


def claims(model: str, runs: Sequence[Run], pool: float) -> list[Claim]:
    """The gain over native of each variant."""
    what = f"{pool:.0%} of the demand: throughput of native,"
    return [
        gain(runs, pool, name).claim("Curve", f"{what} {name}", model)
        for name in variants_of(runs)
        if name != NATIVE
    ]


def table(title: str, runs: Sequence[Run]) -> Table:
    """One row a pool and variant; every pool has native."""
    found = Table(
        title,
        [
            "memory, variant",
            "tok/s",
            "x native",
            "facts found [%]",
            "difference to native [points]",
            "gained, lost, of",
            "at once, most",
            "at once, mean",
            "TTFT p50 | p95 [s]",
            "between tokens p50 | p95 [ms]",
            "kept [%]",
            "preemptions",
        ],
        [],
        [
            f"tok/s: while every client had a request, median [range]; x native: {SHOWN}",
            "facts found: exact 95% interval; difference: answers to the same prompts, Tango's 95% "
            "interval; gained: found by the variant alone, lost: by native alone",
            "kept: live share of a request's tokens at its end, mean",
        ],
    )
    found.rows += [
        _row(runs, pool, variant) for pool in _pools(runs) for variant in variants_of(runs)
    ]
    return found


def _row(runs: Sequence[Run], pool: float, variant: str) -> list[str | int | float | None]:
    here: Labels = {"pool": pool, "variant": variant}
    chosen = pick(runs, **here)
    native = variant == NATIVE
    there: Labels = {"pool": pool, "variant": NATIVE}
    pairs = paired_answers(runs, here, there)
    first, between = (
        [figures(chosen, f"{what}_ms.{p}").median for p in ("p50", "p95")]
        for what in ("ttft", "itl")
    )
    return [
        f"{pool:.0%}, {variant}",
        str(spread([busy_speed(run) for run in chosen])),
        None if native else str(gain(runs, pool, variant)),
        *answer_cells(runs, here, there),
        None if native else f"{pairs.gained}, {pairs.lost}, {pairs.samples}",
        str(figures(chosen, "most_running")),
        str(figures(chosen, "mean_running")),
        f"{first[0] / 1e3:.1f} | {first[1] / 1e3:.1f}",
        f"{between[0]:.0f} | {between[1]:.0f}",
        str(spread([100 * kept(run) for run in chosen])),
        str(figures(chosen, "preemptions")),
    ]


def sentence(runs: Sequence[Run], variant: str) -> str:
    """Where no difference to native is shown; elsewhere its ratio and what it costs in answers.

    A difference is shown at a pool if the interval of its ratio does not have 1.
    """
    pools = sorted(_pools(runs), reverse=True)
    gains = {pool: gain(runs, pool, variant) for pool in pools}
    even = [pool for pool in pools if gains[pool].verdict() == "undecided"]
    shown = f"no difference is shown with memory for {_percents(even)} of the demand"
    parts = [shown] if even else []
    for pool in sorted(gains.keys() - {*even}, reverse=True):
        here: Labels = {"pool": pool, "variant": variant}
        pairs = paired_answers(runs, here, {"pool": pool, "variant": NATIVE})
        answers = f", facts found {points_shown(pairs.difference())} points"
        parts.append(
            f"{pool:.0%}: {gains[pool]} times native's tokens a second"
            + (answers if scored(runs) else "")
        )
    return f"{variant}: {'; '.join(parts)}."


def scored(runs: Sequence[Run]) -> bool:
    """Whether any answer has its fact; a model with random weights finds none."""
    return any(found(runs))


def _percents(pools: Sequence[float]) -> str:
    words = [f"{pool:.0%}" for pool in pools]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _chart(model: str, runs: Sequence[Run]) -> Chart:
    pools, variants = _pools(runs), variants_of(runs)
    x = [100 * pool for pool in pools]
    speed = Panel(f"{model}: tokens a second", "memory [% of the demand]", "times native's")
    speed.lines.append(Line(NATIVE, x[:1], [1.0], reference=True))
    answers = Panel(f"{model}: answers", "memory [% of the demand]", "facts found [%]")
    for variant in variants:
        shares = [share(found(pick(runs, pool=pool, variant=variant))) for pool in pools]
        value, low, high = (
            [100 * getattr(s, end) for s in shares] for end in ("value", "low", "high")
        )
        if variant == NATIVE:
            answers.lines.append(Line(variant, x, value, reference=True))
            continue
        answers.lines.append(Line(variant, x, value, low, high))
        gains = [gain(runs, pool, variant) for pool in pools]
        ends = [effect.interval() or (effect.factor, effect.factor) for effect in gains]
        speed.lines.append(
            Line(variant, x, [g.factor for g in gains], [e[0] for e in ends], [e[1] for e in ends])
        )
    if not scored(runs):
        return Chart(f"Throughput by memory, {model}; bands: 95% intervals", [speed], part=model)
    caption = f"Throughput and facts found by memory, {model}; bands: 95% intervals"
    return Chart(caption, [speed, answers], part=model)


EXPERIMENT = Experiment(
    "curve",
    "throughput, waiting, residency and answers from ample memory to a quarter of the demand",
    "not in the paper",
    comparisons,
    report,
    repeats=8,
)
