"""What causes the gain where memory is short: one change after another, and parts taken back.

The load is one of the curve's: chats with a fact, and a pool for less than half of what the
clients' requests need. All configurations have one budget, and take turns.

    ladder     from stock vLLM to vToken's defaults; the rungs' factors multiply to the whole
    tuned      stock vLLM that runs at most so many requests at once; the fastest number of the
               first repeat is confirmed on the others
    left out   the defaults without one of the parts in which they differ from the paper

Two configurations that one might ask for do not exist. naive-evict has vLLM's admission alone:
compressed admission counts on packed blocks, so it holds only under `reclamation: auto`. The order
in which holes are packed for attention is no setting. The prefix cache is off, so no block is
shared, and the rule for shared blocks changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import BUDGET, FIXED, POLICY
from vtoken_bench.evaluation.curve import CLIENTS, MEMORY, points_at
from vtoken_bench.evaluation.effects import Effect, bounds, busy_speed, over_native
from vtoken_bench.evaluation.points import Comparison, Labels, Part, Point, Run, Setting, pick
from vtoken_bench.evaluation.variants import NAIVE, NATIVE, PAPER, VARIANTS
from vtoken_bench.output import Result, Table

MOST_RUNNING = (3, 4, 5)  # the pool holds 3.5 requests in full
TUNING = 1  # repeats
TUNED = "native, tuned"
GOAL = ">= 1.5"
COLUMNS = (
    columns.SPEED,
    columns.GAIN,
    *columns.ANSWERS,
    columns.PACKING,
    *columns.LATENCIES,
    columns.RUNNING,
    columns.PREEMPTIONS,
)


@dataclass(frozen=True, slots=True)
class Rung:
    """A variant that differs from the one it is compared with by `change`."""

    variant: str
    change: str
    config: dict[str, Any] = field(compare=False)  # a dict has no hash


LADDER = (
    Rung(NAIVE, "eviction, reclaiming nothing", VARIANTS[NAIVE]),
    Rung(
        f"{PAPER}, stock admission",
        "reclaiming as in the paper",
        VARIANTS[PAPER] | {"experiment": VARIANTS[PAPER]["experiment"] | {"admission": "stock"}},
    ),
    Rung(PAPER, "compressed admission", VARIANTS[PAPER]),
    Rung(FIXED, "vToken's defaults for the paper's", {}),
)
STEPS = (NATIVE, *[rung.variant for rung in LADDER])
LEFT_OUT = (
    Rung("without recycling", "recycling", {"recycle": False}),
    Rung("planner pack", "planner `plug`", {"experiment": {"planner": "pack"}}),
    Rung("round rule paper", "`round_rule: price`", {"experiment": {"round_rule": "paper"}}),
)


def comparisons(setting: Setting) -> list[Comparison]:
    """Stock vLLM with every limit, in the first repeat."""
    limits = MOST_RUNNING[1:2] if setting.quick else MOST_RUNNING
    points = [_limited(_native(setting), limit) for limit in limits]
    return [Comparison("limits", points, TUNING)]


def confirmed(setting: Setting, runs: list[Run]) -> list[Comparison]:
    """Everything, with the limit that was fastest, in other repeats."""
    native = _native(setting)
    points = [native, _limited(native, fastest_limit(runs))]
    points += [
        native.configured(rung.variant, BUDGET | rung.config) for rung in (*LADDER, *LEFT_OUT)
    ]
    return [Comparison("ladder", points, TUNING + setting.repeats, first=TUNING)]


def _native(setting: Setting) -> Point:
    return points_at(setting, {}, MEMORY)[0]


def _limited(native: Point, limit: int) -> Point:
    return replace(native.stock(variant=TUNED, limit=limit), max_running=limit)


def fastest_limit(runs: Sequence[Run]) -> int:
    """Of those that ran, by their tokens a second in the first repeat."""
    tried = [run for run in pick(runs, variant=TUNED) if run.repeat < TUNING]
    return int(max(tried, key=busy_speed).labels["limit"])


# ------------------------------------------------------------------ the report


def ladder(runs: Sequence[Run]) -> dict[Rung, Effect]:
    """The factor of each rung over the one before it, in the repeats that have all rungs."""
    complete = _complete(runs)
    return {
        rung: _over(complete, {"variant": rung.variant}, {"variant": before})
        for before, rung in zip(STEPS, LADDER, strict=False)
    }


def _over(runs: Sequence[Run], one: Labels, other: Labels) -> Effect:
    """Tokens a second of `one` over those of `other`, in the repeats that have both."""
    found = Effect.of(runs, busy_speed, one, other)
    assert found is not None
    return found


def _complete(runs: Sequence[Run]) -> list[Run]:
    """Runs of the repeats that have stock vLLM and every rung."""
    ran = [{run.repeat for run in pick(runs, variant=name)} for name in STEPS]
    return [run for run in runs if all(run.repeat in repeats for repeats in ran)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the variants, the factors with their shares, and the claims."""
    factors = ladder(runs)
    whole = over_native(_complete(runs), busy_speed, FIXED)
    tuned: Labels = {"variant": TUNED, "limit": fastest_limit(runs)}
    over_tuned = _over(runs, {"variant": FIXED}, tuned)
    left_out = {
        rung: _over(runs, {"variant": FIXED}, {"variant": rung.variant}) for rung in LEFT_OUT
    }
    result.tables += [
        _variants_table(model, runs),
        _factors_table(model, factors, whole),
        _left_out_table(model, left_out),
    ]
    named = [
        ("throughput of native", whole, GOAL),
        ("throughput of native, tuned", over_tuned, ""),
        *[(f"factor of the ladder: {rung.change}", effect, "") for rung, effect in factors.items()],
        *[
            (f"the defaults, over those without: {rung.change}", effect, "")
            for rung, effect in left_out.items()
        ],
    ]
    result.claims += [effect.claim("Causes", what, model, goal) for what, effect, goal in named]


def _variants_table(model: str, runs: Sequence[Run]) -> Table:
    limits = sorted({int(run.labels["limit"]) for run in pick(runs, variant=TUNED)})
    rows = [
        columns.Row(NATIVE, runs, {"variant": NATIVE}),
        *[
            columns.Row(f"{TUNED}, at most {limit}", runs, {"variant": TUNED, "limit": limit})
            for limit in limits
        ],
        *[
            columns.Row(rung.variant, runs, {"variant": rung.variant})
            for rung in (*LADDER, *LEFT_OUT)
        ],
    ]
    title = (
        f"{model}: memory for {MEMORY:.0%} of the demand of {CLIENTS} clients, {POLICY} at a third "
        "of the prompt"
    )
    found = columns.table(title, "variant", rows, COLUMNS)
    found.notes.append(
        f"{TUNED}: {fastest_limit(runs)} was fastest in the first repeat; its ratio is of the "
        "other repeats"
    )
    return found


def _factors_table(model: str, factors: dict[Rung, Effect], whole: Effect) -> Table:
    table = Table(
        f"{model}: from native to vToken, one change after another",
        ["change", "factor", "share of the gain [%]"],
        [],
        [
            "factor: tokens a second over the line before, geometric mean [95% interval, Student t "
            "of the mean logarithm over the repeats]; the factors multiply to the whole",
            "share: of the logarithm of the whole [95% interval, jackknife over the repeats]",
        ],
    )
    for rung, effect in factors.items():
        table.rows.append([rung.change, str(effect), _share(effect, whole)])
    table.rows.append(["all together", str(whole), "100"])
    return table


def _share(effect: Effect, whole: Effect) -> str:
    value, interval = effect.share(whole)
    if interval is not None:
        interval = 100 * interval[0], 100 * interval[1]
    return f"{100 * value:.0f}{bounds(interval, '.0f')}"


def _left_out_table(model: str, left_out: dict[Rung, Effect]) -> Table:
    return Table(
        f"{model}: what the defaults gain from each of their parts",
        ["part", "the defaults over the defaults without it"],
        [[rung.change, str(effect)] for rung, effect in left_out.items()],
        ["geometric mean of the ratios of the same repeat [95% interval]"],
    )


PART = Part("causes", comparisons, report, confirmed, trained=True)
