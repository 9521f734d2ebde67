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
from dataclasses import dataclass, replace
from typing import Any

from vtoken_bench.charts import Bars, Chart, Panel
from vtoken_bench.evaluation.answers import (
    BUDGET,
    FIXED,
    POLICY,
    answer_cells,
    configured,
)
from vtoken_bench.evaluation.curve import CLIENTS, MEMORY, points_at
from vtoken_bench.evaluation.effects import Effect, bounds, over_native
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Labels,
    Point,
    Run,
    Setting,
    busy_speed,
    figures,
    packing_share,
    pick,
    spread,
    stock_of,
)
from vtoken_bench.evaluation.variants import NAIVE, NATIVE, PAPER, VARIANTS
from vtoken_bench.output import Result, Table

MOST_RUNNING = (3, 4, 5)  # the pool holds 3.5 requests in full
TUNING = 1  # repeats
TUNED = "native, tuned"
GOAL = ">= 1.5"


@dataclass(frozen=True, slots=True)
class Rung:
    """A variant that differs from the one it is compared with by `change`, in a word `short`."""

    variant: str
    short: str
    change: str
    config: dict[str, Any]


LADDER = (
    Rung(NAIVE, "evict", "eviction, reclaiming nothing", VARIANTS[NAIVE]),
    Rung(
        f"{PAPER}, stock admission",
        "reclaim",
        "reclaiming as in the paper",
        VARIANTS[PAPER] | {"experiment": VARIANTS[PAPER]["experiment"] | {"admission": "stock"}},
    ),
    Rung(PAPER, "admission", "compressed admission", VARIANTS[PAPER]),
    Rung(FIXED, "defaults", "vToken's defaults for the paper's", {}),
)
STEPS = (NATIVE, *[rung.variant for rung in LADDER])
LEFT_OUT = (
    Rung("without recycling", "recycle", "recycling", {"recycle": False}),
    Rung("planner pack", "plug", "planner `plug`", {"experiment": {"planner": "pack"}}),
    Rung(
        "round rule paper",
        "price",
        "`round_rule: price`",
        {"experiment": {"round_rule": "paper"}},
    ),
)
ROWS = (NATIVE, TUNED, *[rung.variant for rung in (*LADDER, *LEFT_OUT)])


def comparisons(setting: Setting) -> list[Comparison]:
    """Stock vLLM with every limit, in the first repeat."""
    limits = MOST_RUNNING[1:2] if setting.quick else MOST_RUNNING
    points = [_limited(_native(setting), limit) for limit in limits]
    return [Comparison("limits", points, TUNING, fresh=True)]


def confirmed(setting: Setting, runs: list[Run]) -> list[Comparison]:
    """Everything, with the limit that was fastest, in other repeats."""
    native = _native(setting)
    points = [native, _limited(native, fastest_limit(runs))]
    points += [
        configured(native, rung.variant, BUDGET | rung.config) for rung in (*LADDER, *LEFT_OUT)
    ]
    more = TUNING + setting.repeats
    return [Comparison("ladder", points, more, fresh=True, first=TUNING)]


def _native(setting: Setting) -> Point:
    return points_at(setting, {}, MEMORY)[0]


def _limited(native: Point, limit: int) -> Point:
    return replace(stock_of(native, variant=TUNED, limit=limit), max_running=limit)


def fastest_limit(runs: Sequence[Run]) -> int:
    """Of those that ran, by their tokens a second in the first repeat."""
    tried = [run for run in pick(runs, variant=TUNED) if run.repeat < TUNING]
    return int(max(tried, key=busy_speed).labels["limit"])


# ------------------------------------------------------------------ the report


@dataclass(frozen=True, slots=True)
class Factor:
    """What a change does to tokens a second."""

    change: str
    short: str
    effect: Effect


def ladder(runs: Sequence[Run]) -> list[Factor]:
    """The factor of each rung over the one before it, in the repeats that have all rungs."""
    found = []
    for before, rung in zip(STEPS, LADDER, strict=False):
        one, other = {"variant": rung.variant}, {"variant": before}
        effect = Effect.of(_complete(runs), busy_speed, one, other)
        if effect is not None:
            found.append(Factor(rung.change, rung.short, effect))
    return found


def _complete(runs: Sequence[Run]) -> list[Run]:
    """Runs of the repeats that have stock vLLM and every rung."""
    ran = [{run.repeat for run in pick(runs, variant=name)} for name in STEPS]
    return [run for run in runs if all(run.repeat in repeats for repeats in ran)]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds the variants, the factors with their shares, the sentence, the chart and the claims."""
    factors = ladder(runs)
    whole = over_native(_complete(runs), busy_speed, FIXED)
    limit = fastest_limit(runs)
    tuned: Labels = {"variant": TUNED, "limit": limit}
    over_tuned = Effect.of(runs, busy_speed, {"variant": FIXED}, tuned)
    result.tables += [
        _variants_table(model, runs, limit),
        _factors_table(model, factors, whole),
        _left_out_table(model, runs),
    ]
    result.sentences.append(sentence(model, whole, factors, limit, over_tuned))
    result.claims.append(whole.claim("Causes", "throughput of native", model, GOAL))
    if over_tuned is not None:
        result.claims.append(over_tuned.claim("Causes", "throughput of native, tuned", model))
    result.claims += [
        factor.effect.claim("Causes", f"factor of the ladder: {factor.change}", model)
        for factor in factors
    ]
    result.claims += [
        effect.claim("Causes", f"the defaults, over those without: {rung.change}", model)
        for rung in LEFT_OUT
        if (effect := _left_out(runs, rung)) is not None
    ]
    result.charts.append(_chart(model, factors, runs))


def _left_out(runs: Sequence[Run], rung: Rung) -> Effect | None:
    return Effect.of(runs, busy_speed, {"variant": FIXED}, {"variant": rung.variant})


def _variants_table(model: str, runs: Sequence[Run], limit: int) -> Table:
    table = Table(
        f"{model}: memory for {MEMORY:.0%} of the demand of {CLIENTS} clients, {POLICY} at a third "
        "of the prompt",
        [
            "variant",
            "tok/s",
            "x native",
            "facts found [%]",
            "difference to native [points]",
            "packing [% of the time]",
            "TTFT p50 | p95 [s]",
            "between tokens p50 | p95 [ms]",
            "preemptions",
            "most at once",
            "at once, mean",
        ],
        [],
        [
            "tok/s: while every client had a request, median [range]; x native: geometric mean of "
            "the ratios of the same repeat [95% interval]",
            "facts found: exact 95% interval; difference: answers to the same prompts, Tango's 95% "
            "interval",
            "packing: of holes for attention, a cost of the CPU's kernel",
            f"{TUNED}: the number that was fastest in the first repeat is {limit}; its ratio is of "
            "the other repeats",
        ],
    )
    kinds = {(str(run.labels["variant"]), run.labels.get("limit")) for run in runs}
    for variant, most in sorted(kinds, key=lambda kind: (ROWS.index(kind[0]), kind[1] or 0)):
        one: Labels = {"variant": variant} | ({} if most is None else {"limit": most})
        chosen = pick(runs, **one)
        gain = Effect.of(runs, busy_speed, one, {"variant": NATIVE})
        first, between = (
            [figures(chosen, f"{what}_ms.{p}").median for p in ("p50", "p95")]
            for what in ("ttft", "itl")
        )
        packing = spread([100 * packing_share(run) for run in chosen])
        table.rows.append(
            [
                variant if most is None else f"{TUNED}, at most {most}",
                str(spread([busy_speed(run) for run in chosen])),
                None if variant == NATIVE or gain is None else str(gain),
                *answer_cells(runs, one, {"variant": NATIVE}),
                None if chosen[0].figures.get("pack_us") is None else str(packing),
                f"{first[0] / 1e3:.1f} | {first[1] / 1e3:.1f}",
                f"{between[0]:.0f} | {between[1]:.0f}",
                str(figures(chosen, "preemptions")),
                str(figures(chosen, "most_running")),
                str(figures(chosen, "mean_running")),
            ]
        )
    return table


def _factors_table(model: str, factors: Sequence[Factor], whole: Effect) -> Table:
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
    for factor in factors:
        table.rows.append([factor.change, str(factor.effect), _share(factor.effect, whole)])
    table.rows.append(["all together", str(whole), "100"])
    return table


def _share(effect: Effect, whole: Effect) -> str:
    value, interval = effect.share(whole)
    if interval is not None:
        interval = 100 * interval[0], 100 * interval[1]
    return f"{100 * value:.0f}{bounds(interval, '.0f')}"


def _left_out_table(model: str, runs: Sequence[Run]) -> Table:
    table = Table(
        f"{model}: what the defaults gain from each of their parts",
        ["part", "the defaults over the defaults without it"],
        [],
        ["geometric mean of the ratios of the same repeat [95% interval]"],
    )
    for rung in LEFT_OUT:
        effect = _left_out(runs, rung)
        if effect is not None:
            table.rows.append([rung.change, str(effect)])
    return table


def sentence(
    model: str,
    whole: Effect,
    factors: Sequence[Factor],
    limit: int,
    over_tuned: Effect | None,
) -> str:
    """What causes the gain, in words, from the data alone.

    A cause is named if the interval of its factor excludes 1.
    """
    text = (
        f"**{model}**: with memory for {MEMORY:.0%} of what its clients' requests need, vToken "
        f"with a fixed budget serves {whole} times native vLLM's tokens a second"
    )
    if over_tuned is not None:
        text += f", and {over_tuned} times those of native that runs at most {limit} at once"
    if whole.verdict() == "undecided":
        return f"{text}. No gain is shown."
    kinds: dict[str, list[Factor]] = {"more": [], "less": [], "undecided": []}
    for factor in sorted(factors, key=lambda factor: -factor.effect.factor):
        kinds[factor.effect.verdict()].append(factor)
    what = "gain" if whole.verdict() == "more" else "loss"
    causes, against = ("more", "less") if what == "gain" else ("less", "more")
    words = [_named(factor, whole) for factor in kinds[causes]]
    text += (
        f". The {what} comes from {_listed(words)}."
        if words
        else f". No single change causes the {what}."
    )
    if kinds[against]:
        text += f" Against it: {_listed([_named(factor, whole) for factor in kinds[against]])}."
    if kinds["undecided"]:
        changes = _listed([factor.change for factor in kinds["undecided"]])
        text += f" No effect is shown of: {changes}."
    return text


def _named(factor: Factor, whole: Effect) -> str:
    return f"{factor.change} (x {factor.effect}, {_share(factor.effect, whole)}% of it)"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _chart(model: str, factors: Sequence[Factor], runs: Sequence[Run]) -> Chart:
    panels = []
    parts = [
        (rung.short, effect) for rung in LEFT_OUT if (effect := _left_out(runs, rung)) is not None
    ]
    for title, found in (
        ("one change after another", [(f.short, f.effect) for f in factors]),
        ("the defaults over the defaults without it", parts),
    ):
        ends = [effect.interval() for _, effect in found]
        low = [None if end is None else end[0] for end in ends]
        high = [None if end is None else end[1] for end in ends]
        bars = Bars("tokens a second, factor", [effect.factor for _, effect in found], low, high)
        names = [short for short, _ in found]
        panels.append(Panel(f"{model}: {title}", "", "factor", bars=[bars], groups=names))
    caption = f"What causes the gain with memory for {MEMORY:.0%} of the demand, {model}"
    return Chart(caption, panels, part=model)


EXPERIMENT = Experiment(
    "causes",
    "what causes the gain where memory is short",
    "not in the paper",
    comparisons,
    report,
    confirmed,
    repeats=8,
)
