"""A fixed budget and eviction under pressure, beside native vLLM, on chats with a fact to find.

    ample      four clients and a pool that holds them: CPU time and tokens beside policy `none`
    saturated  all requests at once, and a pool that holds a quarter of them; also a higher fixed
               budget, which is to keep as much as pressure does
    between    Poisson arrivals at shares of what native vLLM serves when saturated

The clock runs during steps only, see `vtoken_bench.vllm.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vtoken_bench.evaluation.answers import (
    BUDGET,
    FIXED,
    PRESSURE,
    blocks_each,
    chat_points,
    configured,
    found,
    kept,
    paired_answers,
    points_shown,
)
from vtoken_bench.evaluation.effects import SHOWN, Effect
from vtoken_bench.evaluation.points import (
    Comparison,
    Experiment,
    Labels,
    Point,
    Run,
    Setting,
    cpu_seconds,
    figures,
    pick,
    speed,
    spread,
)
from vtoken_bench.evaluation.variants import NAIVE, NATIVE
from vtoken_bench.grounds.paired import holm
from vtoken_bench.output import Result, Table

REQUESTS, QUICK_REQUESTS = 16, 8
AMPLE_CLIENTS = 4
HIGHER = 0.55
RATES = (0.5, 1.0, 1.5)  # of what native serves when saturated
NONE, FIXED_HIGHER = "vToken, policy none", "vToken, higher fixed budget"
AMPLE, SATURATED = "ample", "saturated"


def comparisons(setting: Setting) -> list[Comparison]:
    ample = _points(setting, AMPLE, 3 * AMPLE_CLIENTS, concurrency=AMPLE_CLIENTS)
    none = configured(ample[NATIVE], NONE, {"policy": {"name": "none"}})
    saturated = _saturated(setting)
    higher = configured(saturated[NATIVE], FIXED_HIGHER, BUDGET | {"budget_ratio": HIGHER})
    return [
        Comparison(AMPLE, [none, ample[PRESSURE], ample[FIXED]], setting.repeats, fresh=True),
        Comparison(SATURATED, [*saturated.values(), higher], setting.repeats, fresh=True),
    ]


def _saturated(setting: Setting) -> dict[str, Point]:
    return _points(setting, SATURATED, _requests(setting) // 4)


def _requests(setting: Setting) -> int:
    return QUICK_REQUESTS if setting.quick else REQUESTS


def _points(
    setting: Setting, situation: str, held: int, concurrency: int | None = None
) -> dict[str, Point]:
    """By variant. `held`: whole requests that the pool holds."""
    points = chat_points(
        setting,
        {"situation": situation},
        held * blocks_each(setting),
        _requests(setting),
        concurrency=concurrency,
        sample_every=0,  # it would count as CPU time
    )
    return {name: p for p in points if (name := str(p.labels["variant"])) != NAIVE}


def arrivals(setting: Setting, runs: list[Run]) -> list[Comparison]:
    native = pick(runs, situation=SATURATED, variant=NATIVE)
    if setting.quick:
        return []
    served = spread([len(r.figures["requests"]) / r.figure("seconds") for r in native]).median
    return [
        Comparison(
            f"{share:g} of native's rate",
            [
                replace(
                    point,
                    labels={**point.labels, "situation": f"{share:g}"},
                    rate=float(f"{share * served:.2g}"),
                )
                for point in _saturated(setting).values()
            ],
            setting.repeats,
            fresh=True,
        )
        for share in RATES
    ]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds what each variant does under each load, the paired answers, and the claims."""
    result.tables += [_loads(model, runs), _answers(model, runs)]
    pairs: dict[tuple[str, str], tuple[Callable[[Run], float], str, str, str]] = {
        ("Ample: CPU time of pressure, of policy none", "<= 1.01"): (
            cpu_seconds,
            AMPLE,
            PRESSURE,
            NONE,
        ),
        ("Saturated: tokens a second of pressure, of a fixed budget", ">= 0.97"): (
            speed,
            SATURATED,
            PRESSURE,
            FIXED,
        ),
        **{
            (f"Saturated: {what} of pressure, of {name}", ""): (of, SATURATED, PRESSURE, variant)
            for variant, name in ((FIXED_HIGHER, "the higher fixed budget"), (NATIVE, "native"))
            for what, of in (("tokens a second", speed), ("median TTFT", _ttft))
        },
    }
    for (what, goal), (figure, situation, one, other) in pairs.items():
        found = _ratio(runs, figure, situation, one, other)
        if found is not None:
            result.claims.append(found.claim("Pressure", what, model, goal))


def _ratio(
    runs: Sequence[Run], figure: Callable[[Run], float], situation: str, one: str, other: str
) -> Effect | None:
    """`one` over `other` under the same load; None where `other` did not run."""
    return Effect.of(pick(runs, situation=situation), figure, {"variant": one}, {"variant": other})


def _ttft(run: Run) -> float:
    return run.figure("ttft_ms.p50")


def _ttft_p95(run: Run) -> float:
    return run.figure("ttft_ms.p95")


def _pairs_of(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((str(r.labels["situation"]), str(r.labels["variant"])) for r in runs))


def _loads(model: str, runs: Sequence[Run]) -> Table:
    """Medians over the repeats, with their range in brackets."""
    table = Table(
        f"{model}: native vLLM, a fixed budget and eviction under pressure",
        [
            "load",
            "variant",
            "tokens/s",
            "x native",
            "TTFT p50 [s]",
            "TTFT p95 [s]",
            "TTFT p95 x native",
            "between tokens p50 [ms]",
            "kept [%]",
            "facts found",
            "preempted",
            "most at once",
        ],
        [],
        [
            f"load: of native's saturated rate; median [range]; x native: {SHOWN}",
            "kept: live share of a request's tokens at its end, mean",
            "facts found: answers with every string of the fact, all repeats together",
        ],
    )
    for situation, variant in _pairs_of(runs):
        chosen = pick(runs, situation=situation, variant=variant)
        answers = found(chosen)
        waits = [spread([of(r) / 1e3 for r in chosen]) for of in (_ttft, _ttft_p95)]
        faster, waiting = (
            None if variant == NATIVE else _ratio(runs, of, situation, variant, NATIVE)
            for of in (speed, _ttft_p95)
        )
        table.rows.append(
            [
                situation,
                variant,
                str(spread([speed(run) for run in chosen])),
                None if faster is None else str(faster),
                *map(str, waits),
                None if waiting is None else str(waiting),
                str(figures(chosen, "itl_ms.p50")),
                str(spread([100 * kept(run) for run in chosen])),
                f"{sum(answers)} of {len(answers)}",
                sum(int(run.figure("preemptions")) for run in chosen),
                max(int(run.figure("most_running")) for run in chosen),
            ]
        )
    return table


def _answers(model: str, runs: Sequence[Run]) -> Table:
    """The facts that pressure finds beside those of each other variant under the same load."""
    table = Table(
        f"{model}: facts found by pressure and by the others",
        ["load", "beside", "only pressure", "only the other", "difference [points]", "p"],
        [],
        [
            "answers to the same prompts; difference: score interval, 95%, of paired shares; p: "
            "McNemar's exact test, corrected for the number of rows (Holm)"
        ],
    )
    others = [pair for pair in _pairs_of(runs) if pair[1] != PRESSURE]
    pairs = []
    for situation, variant in others:
        here: Labels = {"situation": situation}
        pairs.append(
            paired_answers(runs, {**here, "variant": PRESSURE}, {**here, "variant": variant})
        )
    corrected = holm([pair.p_equal() for pair in pairs])
    for other, pair, p in zip(others, pairs, corrected, strict=True):
        shown = points_shown(pair.difference())
        table.rows.append([*other, pair.gained, pair.lost, shown, f"{p:.2g}"])
    return table


EXPERIMENT = Experiment(
    "pressure",
    "native vLLM, a fixed budget and eviction under pressure, answers scored",
    "not in the paper",
    comparisons,
    report,
    arrivals,
    repeats=8,
)
