"""Tokens that gave way come back: parking beside pressure alone, a fixed budget and native vLLM.

    alone     native vLLM on the two kinds of requests of a burst by themselves: how many chats a
              second it serves when saturated, and when the first long request ends
    bursts    long requests of low priority, and chats at three times that rate for two seconds,
              after 0.4 of that time; parking also with less host memory
    deep      the same for six seconds, which cuts the long requests to their floors
    chats     chats alone, all at once: the shortage lasts as long as they do
    ample     four clients and a pool that holds them: CPU time beside policy `none`
    swap      answers that outgrow the pool under policy `none`: what would be preempted is parked
              whole instead

The clock runs during steps only, see `vtoken_bench.vllm.load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vtoken_bench.claims import Claim
from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import (
    BUDGET,
    CHATS,
    FIXED,
    PRESSURE,
    blocks_each,
    less_than_native,
)
from vtoken_bench.evaluation.bursts import Bursts
from vtoken_bench.evaluation.chats import FactChats
from vtoken_bench.evaluation.effects import Effect, Figure, cpu_seconds, speed
from vtoken_bench.evaluation.points import (
    Comparison,
    Part,
    Point,
    Run,
    Setting,
    pick,
    variants_of,
)
from vtoken_bench.evaluation.prose import Prose
from vtoken_bench.evaluation.variants import NATIVE, PARKED
from vtoken_bench.output import Result, Table, goals_table

ALONE, BURSTS, DEEP, CHATS_ALONE, AMPLE, SWAP = "alone", "bursts", "deep", "chats", "ample", "swap"
KINDS = ("chats", "long")
FEW = 3  # repeats of what stands beside the four arms
DEEP_REPEATS = 6

# The pool holds the long requests whole at their ends, and little more.
DOCUMENTS = FactChats("documents", 400, 24, around_tokens=140)
GROUND = Bursts(4, 200, 300, 400, DOCUMENTS, (0.0,))
QUICK_GROUND = replace(GROUND, num_long=2, least_output=40, most_output=60)
POOL, QUICK_POOL = 112, 44  # blocks of 32 tokens
TIMES, AFTER = 3.0, 0.4  # of native's rate; of native's time to the end of the first long request
BURST_S, DEEP_S = 2.0, 6.0  # chats arrive for so long
SATURATING, QUICK_SATURATING = 12, 4  # chats
SPARE = {"low_watermark_blocks": 4, "headroom_blocks": 4}
UNDER: dict[str, Any] = BUDGET | SPARE | {"evict_when": "pressure"}
PARKING, TWICE = "vToken, parking", "vToken, twice the host"
HALF, QUARTER = "vToken, half the host", "vToken, a quarter"
ARMS = {FIXED: BUDGET | SPARE, PRESSURE: UNDER, PARKING: UNDER | {PARKED: 1.0}}
SIZES = {HALF: UNDER | {PARKED: 0.5}, QUARTER: UNDER | {PARKED: 0.25}}
TWICE_HOST = UNDER | {PARKED: 2.0}  # the most that `--vtoken-park-bytes auto` takes
DEEP_ARMS = {PRESSURE: UNDER, PARKING: ARMS[PARKING], TWICE: TWICE_HOST}

CLIENTS, CHATS_AT_ONCE = 4, 16
ANSWERS, SWAP_REQUESTS, SWAP_POOL = Prose(128, 256), 6, 36  # three of them whole
SWAP_RATE = 2.0  # a second: the price of a prompt is known from a few steps with one
NONE, SWAPPING = "vToken, policy none", "vToken, policy none, parking"

SPEEDS = (
    columns.of_figure("tok/s", speed, "tok/s: median [range]"),
    columns.of_ratio("x native", speed),
    *columns.ANSWERS,
    *columns.LATENCIES,
    columns.PREEMPTIONS,
)
MIB = 2**20


def outlived(run: Run) -> float:
    """Percent of the given tokens whose request still ran when the shortage was over."""
    return 100 * run.figure("outlived_tokens") / max(1.0, run.figure("given_tokens"))


def thrashed(run: Run) -> float:
    """Percent of the restored tokens that gave way again within 5 s."""
    return 100 * run.figure("thrashed_tokens") / max(1.0, run.figure("restored_tokens"))


def recomputed(run: Run) -> float:
    """Tokens of the situation `swap` that were computed again; nothing computes the last token of
    an answer.
    """
    once = run.figure("prompt_tokens") + run.figure("tokens") - SWAP_REQUESTS
    return run.figure("computed_tokens") - once


PARKED_TOKENS = (
    columns.of_figure("given", "given_tokens"),
    columns.of_figure(
        "outlived [%]",
        outlived,
        "outlived: given tokens whose request still ran when for 500 ms nobody had waited or given",
    ),
    columns.of_figure("copied", "parked_tokens"),
    columns.of_figure("restored", "restored_tokens"),
    columns.of_figure("thrashed [%]", thrashed, "thrashed: of the restored, within 5 s"),
    columns.of_figure("dropped", "dropped_tokens"),
    columns.of_figure("host MiB at peak", lambda run: run.figure("park_peak_bytes") / MIB),
)
SWAPS = (
    columns.of_figure("seconds", "seconds", "seconds: until all were complete, median [range]"),
    columns.of_ratio("x native", "seconds"),
    columns.PREEMPTIONS,
    columns.of_figure("computed again", recomputed, "computed again: tokens"),
    columns.of_percentiles("TTFT p50 | p95 [s]", "ttft_ms", 1e3, 1),
)


def comparisons(setting: Setting) -> list[Comparison]:
    """What native does alone, which the bursts follow from."""
    chats, long = ({"situation": f"{ALONE}, {kind}", "variant": NATIVE} for kind in KINDS)
    ground, pool = _ground(setting)
    both = [
        setting.point(chats, DOCUMENTS, _saturating(setting), pool),
        setting.point(long, ground, ground.num_long, pool),
    ]
    return [Comparison(ALONE, both, 1)]


def _ground(setting: Setting) -> tuple[Bursts, int]:
    """Without its burst, and the blocks of its pool."""
    return (QUICK_GROUND, QUICK_POOL) if setting.quick else (GROUND, POOL)


def _saturating(setting: Setting) -> int:
    return QUICK_SATURATING if setting.quick else SATURATING


def others(setting: Setting, runs: list[Run]) -> list[Comparison]:
    """All the rest; the four arms in every repeat, what stands beside them in the first ones."""
    few, native = min(FEW, setting.repeats), _bursts(setting, runs, BURSTS, BURST_S)
    deep = _bursts(setting, runs, DEEP, DEEP_S)
    arms, sizes, deep_arms = (
        _configured(native, ARMS),
        _configured(native, SIZES),
        _configured(deep, DEEP_ARMS),
    )
    return [
        Comparison(BURSTS, [native, *arms, *sizes], few),
        Comparison(BURSTS, [native, *arms], setting.repeats, first=few),
        Comparison(DEEP, [deep, *deep_arms], min(DEEP_REPEATS, setting.repeats)),
        Comparison(CHATS_ALONE, _chats(setting), few),
        Comparison(AMPLE, _ample(setting), few),
        Comparison(SWAP, _swap(setting), few),
    ]


def _bursts(setting: Setting, runs: list[Run], situation: str, burst_s: float) -> Point:
    """Native in bursts of chats that arrive within `burst_s`."""
    (chats,), (long,) = (pick(runs, situation=f"{ALONE}, {kind}") for kind in KINDS)
    alone, pool = _ground(setting)
    rate = TIMES * _saturating(setting) / chats.figure("seconds")
    first_end = min(end for _, _, end, _ in long.figures["requests"])
    ground = replace(alone, starts_s=(round(AFTER * first_end, 1),), burst_s=burst_s)
    count = ground.num_long + round(rate * burst_s)
    return setting.point({"situation": situation, "variant": NATIVE}, ground, count, pool)


def _configured(native: Point, arms: dict[str, dict[str, Any]]) -> list[Point]:
    return [native.configured(name, config) for name, config in arms.items()]


def _chats(setting: Setting) -> list[Point]:
    pool = CHATS_AT_ONCE // 4 * blocks_each(setting)
    native = setting.point({"situation": CHATS_ALONE}, CHATS, CHATS_AT_ONCE, pool)
    return [native.configured(name, ARMS[name]) for name in (PRESSURE, PARKING)]


def _ample(setting: Setting) -> list[Point]:
    pool = 3 * CLIENTS * blocks_each(setting)
    native = setting.point({"situation": AMPLE}, CHATS, 2 * CLIENTS, pool, concurrency=CLIENTS)
    return [
        native.configured(NONE, {"policy": {"name": "none"}}),
        native.configured(PARKING, ARMS[PARKING]),
    ]


def _swap(setting: Setting) -> list[Point]:
    labels = {"situation": SWAP, "variant": NATIVE}
    native = setting.point(labels, ANSWERS, SWAP_REQUESTS, SWAP_POOL, rate=SWAP_RATE)
    none = {"policy": {"name": "none"}}
    return [
        native,
        native.configured(NONE, none),
        native.configured(SWAPPING, none | {PARKED: 1.0}),
    ]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds a table a situation, and the claims."""

    def table(title: str, situation: str, chosen: Sequence[columns.Column]) -> Table:
        here = pick(runs, situation=situation)
        first = pick(here, variant=NATIVE)
        names = variants_of(here)
        if any("given" in column.heading for column in chosen):  # stock vLLM has no such counters
            names = [name for name in names if name != NATIVE]
        against = {"variant": NATIVE if first else names[0]}
        rows = [columns.Row(name, here, {"variant": name}, against) for name in names]
        return columns.table(f"{model}: {title}", "variant", rows, chosen)

    in_bursts = f"bursts at {TIMES:g} times native's rate while {GROUND.num_long} long requests run"
    in_deep = f"{DEEP_S:g} seconds of such a burst"
    result.tables += [
        table(in_bursts, BURSTS, SPEEDS),
        table(f"what gave way, {in_bursts}", BURSTS, PARKED_TOKENS),
        table(in_deep, DEEP, SPEEDS),
        table(f"what gave way, {in_deep}", DEEP, PARKED_TOKENS),
        table("chats alone, which a shortage outlasts", CHATS_ALONE, PARKED_TOKENS),
        table("answers that outgrow the pool, policy none", SWAP, SWAPS),
    ]
    claims = _claims(model, runs)
    result.tables.append(goals_table(claims))
    result.claims += claims


def _claims(model: str, runs: Sequence[Run]) -> list[Claim]:
    found = [
        Claim.of(
            "Parking", f"{what}: facts, {name}, less native's", model, values, "points", goal=g
        )
        for what, situation in (("Bursts", BURSTS), ("Deep", DEEP))
        for name, g in ((FIXED, ""), (PRESSURE, "<= -10"), (PARKING, ">= -3"), (TWICE, ">= -3"))
        if (values := less_than_native(pick(runs, situation=situation), name))
    ]
    for what, figure, situation, one, other, goal in RATIOS:
        labels = ({"variant": name} for name in (one, other))
        effect = Effect.of(pick(runs, situation=situation), figure, *labels)
        if effect is not None:
            found.append(effect.claim("Parking", what, model, goal))
    own = [
        thrashed(run) for at in (BURSTS, DEEP) for run in pick(runs, situation=at, variant=PARKING)
    ]
    idle = [r.figure("parked_tokens") for r in pick(runs, situation=AMPLE, variant=PARKING)]
    for what, values, unit, goal in (
        ("Bursts: restored tokens that gave way again within 5 s", own, "%", "<= 5"),
        ("Ample: tokens copied", idle, "tokens", "<= 0"),
    ):
        if values:
            found.append(Claim.of("Parking", what, model, values, unit, goal=goal))
    return found


# What, figure, load, whose, over whose, goal.
RATIOS: tuple[tuple[str, Figure, str, str, str, str], ...] = (
    (
        "Bursts: tokens a second of parking, of pressure",
        speed,
        BURSTS,
        PARKING,
        PRESSURE,
        ">= 0.98",
    ),
    ("Deep: tokens a second of parking, of pressure", speed, DEEP, PARKING, PRESSURE, ">= 0.98"),
    (
        "Deep: tokens a second of twice the host, of pressure",
        speed,
        DEEP,
        TWICE,
        PRESSURE,
        ">= 0.98",
    ),
    (
        "Bursts: TTFT p95 of parking, of native",
        lambda run: run.figure("ttft_ms.p95"),
        BURSTS,
        PARKING,
        NATIVE,
        "",
    ),
    ("Ample: CPU time of parking, of policy none", cpu_seconds, AMPLE, PARKING, NONE, "<= 1.01"),
    (
        "Swap: seconds until all are complete, of those with preemption",
        lambda run: run.figure("seconds"),
        SWAP,
        SWAPPING,
        NONE,
        "",
    ),
)
PART = Part("parking", comparisons, report, others, trained=True)
