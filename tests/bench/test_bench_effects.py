"""Causes, curve and pressure: factors, shares and tables, from runs that are made up."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from vtoken_bench.evaluation import causes, curve, pressure
from vtoken_bench.evaluation.answers import CHATS, FIXED, PRESSURE, kept, paired_answers
from vtoken_bench.evaluation.effects import Effect
from vtoken_bench.evaluation.points import Point, Run, Setting
from vtoken_bench.evaluation.variants import NAIVE, NATIVE, PAPER, configuration
from vtoken_bench.output import Result, new_result

SETTING = Setting("trained", 32, quick=False, repeats=4)
NOISE = (0.98, 1.03, 1.0, 0.99, 1.02, 0.97)


def test_an_effect_is_a_geometric_mean_with_students_interval_of_logarithms() -> None:
    values = (1.2, 1.5, 1.35, 1.4)
    logs = [math.log(v) for v in values]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    effect = Effect(values)
    assert effect.factor == pytest.approx(stats.gmean(values))
    assert effect.interval() == pytest.approx((math.exp(low), math.exp(high)))
    assert Effect((1.5, 1.6)).interval() is None


def test_shares_of_factors_sum_to_the_whole_and_vary_as_the_repeats_do() -> None:
    one, other = Effect((1.2, 1.3, 1.25, 1.22)), Effect((1.1, 1.12, 1.08, 1.1))
    whole = Effect(tuple(a * b for a, b in zip(one.values, other.values, strict=True)))
    shares = [effect.share(whole) for effect in (one, other)]
    assert sum(value for value, _ in shares) == pytest.approx(1)
    for value, interval in shares:
        assert interval is not None
        assert interval[0] < value < interval[1]
    same = Effect((1.3,) * 4).share(Effect((1.3**2,) * 4))
    assert same[0] == pytest.approx(0.5)
    assert same[1] == pytest.approx((0.5, 0.5))
    assert Effect((1.2, 1.3)).share(Effect((1.4, 1.5)))[1] is None


# ---------------------------------------------------------------- causes


def busy(variant: str, repeat: int, speed: float, **labels: Any) -> Run:
    latency = {"p50": 1000.0, "p95": 2000.0}
    figures = {
        "busy": {"tokens": speed * 10, "seconds": 10.0},
        "seconds": 12.0,
        "ttft_ms": latency,
        "itl_ms": latency,
        "preemptions": 0,
        "most_running": 8,
        "mean_running": 6.5,
        "found": [True, False],
        **({} if variant in (NATIVE, causes.TUNED) else {"pack_us": 1_200_000}),
    }
    return Run({"variant": variant, **labels}, repeat, figures)


def causes_runs(factors: dict[str, float], repeats: int = 6) -> list[Run]:
    """`factors` by variant, of the ladder; native makes 100 tokens a second."""
    runs = []
    for repeat in range(causes.TUNING):
        runs += [busy(causes.TUNED, repeat, s, limit=n) for n, s in ((3, 90.0), (5, 120.0))]
    for number in range(repeats):
        repeat = causes.TUNING + number
        speed = 100.0 * NOISE[number]
        runs.append(busy(NATIVE, repeat, speed))
        for n, rung in enumerate(causes.LADDER):
            speed *= factors.get(rung.variant, 1.0) * (1 + 0.01 * ((n + number) % 3 - 1))
            runs.append(busy(rung.variant, repeat, speed))
        runs.append(busy(causes.TUNED, repeat, 110.0 * NOISE[number], limit=5))
        runs += [busy(rung.variant, repeat, speed / 1.1) for rung in causes.LEFT_OUT]
    return runs


def test_the_ladder_leads_from_eviction_alone_to_the_defaults_one_change_a_rung() -> None:
    measured = [*causes.comparisons(SETTING), *causes.confirmed(SETTING, causes_runs({}))]
    points = {str(p.labels["variant"]): p for c in measured for p in c.points}

    def settings(variant: str) -> dict[str, Any]:
        point = points[variant]
        found = configuration(point.config, point.engine.num_blocks)
        experiment = found.pop("experiment")
        return {**found, **experiment}

    steps = [rung.variant for rung in causes.LADDER]
    assert steps[0] == NAIVE
    assert steps[2] == PAPER
    assert steps[-1] == FIXED
    changed = []
    for before, after in pairwise(steps):
        one, other = settings(before), settings(after)
        changed.append({name for name in one if one[name] != other[name]})
    reclaiming = {"planner", "recycle", "round_rule", "low_watermark_blocks", "prefix_sharing"}
    assert changed == [{"reclamation", "admission"} | reclaiming, {"admission"}, reclaiming]
    defaults = settings(FIXED)
    for rung in causes.LEFT_OUT:
        taken = settings(rung.variant)
        assert len([name for name in taken if taken[name] != defaults[name]]) == 1
    # One budget for all, and the load of one of the curve's pools: its gain is taken apart here.
    assert len({settings(name)["budget_ratio"] for name in steps}) == 1
    (pool,) = [c for c in curve.comparisons(SETTING) if c.points[0].labels["pool"] == curve.MEMORY]
    of_curve = {str(point.labels["variant"]): replace(point, labels={}) for point in pool.points}
    for variant in (NATIVE, NAIVE, FIXED):
        assert replace(points[variant], labels={}) == of_curve[variant]


def test_stock_vllm_is_tuned_on_the_first_repeat_and_confirmed_on_the_others() -> None:
    first = causes.comparisons(SETTING)
    assert [(c.first, c.repeats) for c in first] == [(0, causes.TUNING)]
    limits = [p.max_running for p in first[0].points if p.max_running]
    assert tuple(limits) == causes.MOST_RUNNING
    runs = causes_runs({})
    assert causes.fastest_limit(runs) == 5
    (rest,) = causes.confirmed(SETTING, runs)
    assert (rest.first, rest.repeats) == (causes.TUNING, causes.TUNING + 4)
    assert [p.max_running for p in rest.points if p.max_running] == [5]
    assert all(p.engine.stock for p in rest.points if p.max_running)
    assert len({str(p.key(0)) for p in rest.points}) == len(rest.points)


def reported(runs: list[Run]) -> Result:
    result = new_result("evaluation-causes", "make bench-evaluation", {})
    causes.report(result, "trained", runs)
    return result


def test_factors_multiply_to_the_whole() -> None:
    result = reported(causes_runs({NAIVE: 0.8, PAPER: 1.5, FIXED: 1.3}))
    claims = {claim.what: claim for claim in result.claims}
    whole = claims["throughput of native"]
    product = math.prod(
        claims[f"factor of the ladder: {rung.change}"].value for rung in causes.LADDER
    )
    assert product == pytest.approx(whole.value)
    assert whole.value == pytest.approx(0.8 * 1.5 * 1.3, rel=0.02)
    assert len(whole.values) == 6
    assert whole.interval == pytest.approx(Effect(tuple(whole.values)).interval())
    assert claims["the defaults, over those without: recycling"].value == pytest.approx(1.1)
    rows = {row[0]: row for row in result.tables[0].rows}
    tuned = [f"{causes.TUNED}, at most {limit}" for limit in (3, 5)]
    rest = [rung.variant for rung in (*causes.LADDER, *causes.LEFT_OUT)]
    assert [*rows] == [NATIVE, *tuned, *rest]
    assert rows[NATIVE][4:6] == [None, None]
    assert rows[FIXED][4:6] == ["+0 [-24 .. +24]", "10.0"]


def test_a_run_that_was_interrupted_in_its_repeats_compares_complete_ones() -> None:
    runs = [r for r in causes_runs({PAPER: 1.5}) if (r.labels["variant"], r.repeat) != (PAPER, 5)]
    factors = causes.ladder(runs)
    assert {len(effect.values) for effect in factors.values()} == {5}


# ---------------------------------------------------------------- curve and pressure


def chats(pool: float, variant: str, repeat: int, speed: float, found: str) -> Run:
    run = busy(variant, repeat, speed)
    run.figures["found"] = [flag == "1" for flag in found]
    if variant != NATIVE:
        run.figures["kept_share_sum"] = 0.5 * len(found)
    return Run({"pool": pool, "variant": variant}, repeat, run.figures)


def curve_runs() -> list[Run]:
    speeds = {
        1.0: {NATIVE: 100.0, NAIVE: 90.0, FIXED: 98.0, PRESSURE: 100.0},
        0.25: {NATIVE: 50.0, NAIVE: 45.0, FIXED: 80.0, PRESSURE: 51.0},
    }
    found = {NATIVE: "1111", NAIVE: "1101", FIXED: "1101", PRESSURE: "1111"}
    return [
        chats(pool, variant, repeat, speed * (1 + 0.02 * ((2 * n + repeat) % 4)), found[variant])
        for pool, variants in speeds.items()
        for n, (variant, speed) in enumerate(variants.items())
        for repeat in range(4)
    ]


def test_the_curve_has_speed_and_answers_of_the_same_runs() -> None:
    result = new_result("evaluation-curve", "make bench-evaluation", {})
    curve.report(result, "trained", curve_runs())
    (table,) = result.tables
    rows = {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert next(iter(rows)) == f"100%, {NATIVE}"
    fixed = rows[f"25%, {FIXED}"]
    assert fixed["kept [%]"] == "50.0"
    assert fixed["facts found [%]"].startswith("75 [")
    assert rows[f"25%, {NATIVE}"]["kept [%]"] == "100"
    assert rows[f"25%, {NATIVE}"]["x native"] is None
    speed, answers = result.charts[0].panels
    assert [line.name for line in speed.lines] == [NATIVE, NAIVE, FIXED, PRESSURE]
    assert answers.lines[2].y == [75.0, 75.0]
    assert {claim.row for claim in result.claims} == {"Curve"}
    assert all(len(claim.values) == 4 for claim in result.claims)


def test_a_model_that_finds_no_fact_has_no_chart() -> None:
    runs = curve_runs()
    for run in runs:
        run.figures["found"] = [False] * 4
    result = new_result("evaluation-curve", "make bench-evaluation", {})
    curve.report(result, "demo", runs)
    assert result.charts == []


def test_pools_of_the_curve_are_shares_of_what_the_clients_need() -> None:
    found = curve.comparisons(SETTING)
    blocks = [comparison.points[0].engine.num_blocks for comparison in found]
    whole = curve.CLIENTS * -(-CHATS.longest() // 32)
    assert blocks == [round(share * whole) for share in curve.POOLS]
    assert blocks[0] == whole


def pressure_runs() -> list[Run]:
    runs = []
    for comparison in pressure.comparisons(SETTING):
        for n, point in enumerate(comparison.points):
            for repeat in range(4):
                run = chats(1.0, str(point.labels["variant"]), repeat, 1.0, "1101")
                more = {"cpu_seconds": 10.0 + n, "tokens": 100 + n}
                runs.append(Run(point.labels, repeat, run.figures | more))
    return runs


def test_pressure_reports_its_goals_and_adds_arrivals_at_natives_rate() -> None:
    runs = pressure_runs()
    result = new_result("evaluation-pressure", "make bench-pressure", {})
    pressure.report(result, "trained", runs)
    goals = {claim.what: claim.goal for claim in result.claims if claim.goal}
    assert list(goals.values()) == ["<= 1.01", ">= 0.97"]
    assert len(result.claims) == 6
    rates = pressure.arrivals(SETTING, runs)
    assert [c.points[0].labels["situation"] for c in rates] == ["0.5", "1", "1.5"]
    served = 4 / 12.0  # requests a second
    assert [c.points[0].rate for c in rates] == pytest.approx(
        [share * served for share in pressure.RATES], rel=0.05
    )


def test_answers_are_paired_by_prompt_and_repeat() -> None:
    runs = [
        chats(1.0, NATIVE, 0, 1.0, "1100"),
        chats(1.0, FIXED, 0, 1.0, "1010"),
        chats(1.0, NATIVE, 1, 1.0, "1111"),  # the other did not run yet
    ]
    pairs = paired_answers(runs, {"variant": FIXED}, {"variant": NATIVE})
    assert (pairs.samples, pairs.gained, pairs.lost) == (4, 1, 1)
    assert (kept(runs[0]), kept(runs[1])) == (1.0, 0.5)


def test_a_load_is_one_of_the_trained_models_chats() -> None:
    points: list[Point] = curve.comparisons(SETTING)[0].points  # type: ignore[assignment]
    assert {str(point.labels["variant"]) for point in points} == {NATIVE, NAIVE, FIXED, PRESSURE}
    assert len({(p.num_requests, p.concurrency, p.engine.num_blocks) for p in points}) == 1
    assert Path(points[0].engine.model).name == "trained"
