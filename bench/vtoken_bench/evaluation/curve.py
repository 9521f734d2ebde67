"""How much memory has to be missing before eviction gains, and what it costs in answers there.

The pool holds from all of what the clients' requests need down to a quarter. Requests are chats
with a fact to find, so tokens a second, waiting, residency and facts found are of the same outputs.
The budget is a third of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.claims import Claim
from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import (
    FIXED,
    POLICY,
    answers_interval,
    blocks_each,
    chat_points,
    found,
)
from vtoken_bench.evaluation.effects import Effect, busy_speed, over_native, unpacked_speed
from vtoken_bench.evaluation.points import (
    Comparison,
    Labels,
    Part,
    Point,
    Run,
    Setting,
    pick,
    variants_of,
)
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.output import Result, Table

# Speeds are of the time until the last request arrives, when ten have ended. Eight repeats give 144
# pairs of answers.
CLIENTS, REQUESTS, QUICK_REQUESTS = 8, 18, 10
MEMORY = 0.45  # the pool that the causes and the client over HTTP have too
POOLS = (1.0, 0.7, MEMORY, 0.25)  # of what the clients' requests need at their end
QUICK_POOLS = (1.0, 0.25)
NAIVE_GOAL = ">= 1.3"
COLUMNS = (
    columns.SPEED,
    columns.GAIN,
    *columns.ANSWERS,
    *columns.LATENCIES,
    columns.KEPT,
    columns.RUNNING,
    columns.PREEMPTIONS,
)


def comparisons(setting: Setting) -> list[Comparison]:
    return [
        Comparison(
            f"{pool:.0%} of the demand", points_at(setting, {"pool": pool}, pool), setting.repeats
        )
        for pool in (QUICK_POOLS if setting.quick else POOLS)
    ]


def points_at(setting: Setting, labels: Labels, pool: float) -> list[Point]:
    """Every variant with memory for the share `pool` of the demand; native is the first."""
    blocks = round(pool * CLIENTS * blocks_each(setting))
    requests = QUICK_REQUESTS if setting.quick else REQUESTS
    return chat_points(setting, labels, blocks, requests, concurrency=CLIENTS)


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the table, the chart and the claims."""
    title = (
        f"{model}: memory from all of the demand of {CLIENTS} clients to a quarter of it, {POLICY} "
        "at a third of the prompt"
    )
    result.tables.append(by_pool(title, runs))
    for pool in _pools(runs):
        result.claims += claims(model, runs, pool)
        gained = Effect.of(
            pick(runs, pool=pool), unpacked_speed, {"variant": FIXED}, {"variant": NAIVE}
        )
        assert gained is not None  # both are in every repeat
        what = f"{pool:.0%} of the demand: throughput of naive-evict, packing taken out, {FIXED}"
        goal = NAIVE_GOAL if pool == MEMORY else ""
        result.claims.append(gained.claim("Curve", what, model, goal))
    if any(found(runs)):  # a model with random weights finds nothing
        result.charts.append(_chart(model, runs))


def _pools(runs: Sequence[Run]) -> list[float]:
    return list(dict.fromkeys(float(run.labels["pool"]) for run in runs))


def claims(model: str, runs: Sequence[Run], pool: float) -> list[Claim]:
    """The gain over native of each variant, while every client had a request."""
    what = f"{pool:.0%} of the demand: throughput of native,"
    here = pick(runs, pool=pool)
    return [
        over_native(here, busy_speed, name).claim("Curve", f"{what} {name}", model)
        for name in variants_of(here)
        if name != NATIVE
    ]


def by_pool(title: str, runs: Sequence[Run]) -> Table:
    """One row a pool and variant; every pool has native."""
    rows = [
        columns.Row(f"{pool:.0%}, {variant}", pick(runs, pool=pool), {"variant": variant})
        for pool in _pools(runs)
        for variant in variants_of(runs)
    ]
    return columns.table(title, "memory, variant", rows, COLUMNS)


def _chart(model: str, runs: Sequence[Run]) -> Chart:
    pools = _pools(runs)
    x = [100 * pool for pool in pools]
    speed = Panel(f"{model}: tokens a second", "memory [% of the demand]", "times native's")
    speed.lines.append(Line(NATIVE, x[:1], [1.0], reference=True))
    answers = Panel(f"{model}: answers", "memory [% of the demand]", "facts found [%]")
    for variant in variants_of(runs):
        shares = [answers_interval(pick(runs, pool=pool, variant=variant)) for pool in pools]
        value, low, high = (
            [100 * getattr(s, end) for s in shares] for end in ("value", "low", "high")
        )
        if variant == NATIVE:
            answers.lines.append(Line(variant, x, value, reference=True))
            continue
        answers.lines.append(Line(variant, x, value, low, high))
        gains = [over_native(pick(runs, pool=pool), busy_speed, variant) for pool in pools]
        ends = [gain.interval() or (gain.factor, gain.factor) for gain in gains]
        speed.lines.append(
            Line(variant, x, [g.factor for g in gains], [e[0] for e in ends], [e[1] for e in ends])
        )
    caption = f"Throughput and facts found by memory, {model}; bands: 95% intervals"
    return Chart(caption, [speed, answers], part=model)


PART = Part("curve", comparisons, report)
