"""Chats of several turns under shortage: vToken as it ships beside native vLLM and ample memory.

Eight chats at once; the next turn of each is sent when the answer to the last one has ended. The
pool holds half of what they need at their ends. Answers are short: blocks come back by themselves
soon, and a next turn finds its beginning in the prefix cache unless another has taken its blocks.

    native                   stock vLLM: it waits, preempts, and takes blocks of the prefix cache
    vToken, auto             `--vtoken-policy auto`, with host memory for all that gives way
    vToken, auto, no parking the same without host memory
    native, ample memory     the ideal: it hits all of each prompt that a prompt before it had

`--also FIELD=VALUE` adds `auto` with another setting. The clock runs during steps only, see
`vtoken_bench.vllm.load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vtoken.core.config.values import AUTO_PATCH, VTokenConfig
from vtoken.vllm.startup.host_memory import MOST_POOLS
from vtoken_bench.claims import Claim
from vtoken_bench.evaluation import columns
from vtoken_bench.evaluation.answers import less_than_native
from vtoken_bench.evaluation.conversations import TURNS, Conversations, age
from vtoken_bench.evaluation.effects import Effect, Figure
from vtoken_bench.evaluation.parking import PARKED_TOKENS
from vtoken_bench.evaluation.points import Comparison, Part, Point, Run, Setting, pick, variants_of
from vtoken_bench.evaluation.variants import NATIVE, PARKED
from vtoken_bench.output import Result, Table, goals_table

CHATS, CLIENTS = 16, 8
QUICK_CHATS = 4  # all at once
GROUND = Conversations(250, 28)
MEMORY, ENOUGH = 0.5, 2.0  # of what the clients' chats need at their ends
AUTO, NO_PARKING, AMPLE = "vToken, auto", "vToken, auto, no parking", "native, ample memory"
NOT_PARKED: dict[str, Any] = AUTO_PATCH | {"interval_tokens": VTokenConfig().interval_tokens}
SHIPPED = NOT_PARKED | {PARKED: float(MOST_POOLS)}  # what `auto` takes where the host has it


def hits(run: Run) -> float:
    """Percent of prompt tokens that were found in the prefix cache."""
    return 100 * run.figure("hit_tokens") / run.figure("prompt_tokens")


def evicted(run: Run) -> float:
    """Tokens, for each token of output."""
    return run.figure("evicted_tokens") / run.figure("tokens")


SPEEDS = (
    columns.of_figure("seconds", "seconds", "seconds: until all were complete, median [range]"),
    columns.of_ratio("x native", "seconds"),
    columns.of_figure(
        "prefix hits [%]", hits, f"prefix hits: of prompt tokens; the ideal is that of {AMPLE}"
    ),
    columns.of_figure("computed", "computed_tokens", "computed: tokens of all forwards"),
    columns.PREEMPTIONS,
    columns.RUNNING,
    *columns.ANSWERS,
    columns.KEPT,
)
FIRST_TOKENS = (
    columns.of_percentiles("all", "ttft_ms", 1e3, 1),
    columns.of_ratio("p50 x native", "ttft_ms.p50"),
    columns.of_ratio("p95 x native", "ttft_ms.p95"),
    *[
        columns.of_percentiles(f"turn {turn}", f"turn_ttft_ms.{turn}", 1e3, 1)
        for turn in range(1, TURNS + 1)
    ],
)
GIVEN = (
    columns.of_figure("evicted a token", evicted, "evicted: for each token of output"),
    *PARKED_TOKENS,
)


def comparisons(setting: Setting) -> list[Comparison]:
    native = _native(setting, NATIVE, MEMORY)
    also = {f"{AUTO}, {name} {value}": {name: value} for name, value in setting.also}
    points = [
        native,
        native.configured(AUTO, SHIPPED),
        native.configured(NO_PARKING, NOT_PARKED),
        *[native.configured(variant, SHIPPED | patch) for variant, patch in also.items()],
        _native(setting, AMPLE, ENOUGH),
    ]
    return [Comparison("turns", points, setting.repeats)]


def _native(setting: Setting, variant: str, memory: float) -> Point:
    """With memory for this share of what the chats at once need at their ends."""
    chats = QUICK_CHATS if setting.quick else CHATS
    at_once = min(CLIENTS, chats)
    blocks = round(memory * at_once * -(-GROUND.longest() // setting.block_size))
    return setting.point({"variant": variant}, GROUND, TURNS * chats, blocks, concurrency=at_once)


def of_age(runs: Sequence[Run], turns: int) -> list[Run]:
    """The runs with only those answers whose facts were stated so many turns ago."""
    return [
        replace(run, figures={"found": [f for n, f in enumerate(found) if age(n) == turns]})
        for run in runs
        if (found := run.figures["found"])
    ]


def report(result: Result, model: str, runs: list[Run]) -> None:
    """Adds total times, first tokens by turn, facts by age, what gave way, and the claims."""
    names = variants_of(runs)

    def table(title: str, names: Sequence[str], chosen: Sequence[columns.Column]) -> Table:
        rows = [columns.Row(name, runs, {"variant": name}) for name in names]
        return columns.table(f"{model}: {title}", "variant", rows, chosen)

    by_age = [
        columns.Row(f"{turns}, {name}", of_age(runs, turns), {"variant": name})
        for turns in range(TURNS)
        for name in names
    ]
    evicting = [name for name in names if name not in (NATIVE, AMPLE)]
    claims = _claims(model, runs, evicting)
    result.tables += [
        table(f"chats of {TURNS} turns, memory for {MEMORY:.0%}", names, SPEEDS),
        table("time to first token by turn, p50 | p95 [s]", names, FIRST_TOKENS),
        columns.table(f"{model}: facts by age", "turns ago, variant", by_age, columns.ANSWERS),
        table("what gave way", evicting, GIVEN),
        goals_table(claims),
    ]
    result.claims += claims


# What, figure and goal, of each variant over native.
RATIOS: tuple[tuple[str, Figure, str], ...] = (
    ("total time", lambda run: run.figure("seconds"), "<= 1"),
    ("median TTFT", lambda run: run.figure("ttft_ms.p50"), ""),
    ("TTFT p95", lambda run: run.figure("ttft_ms.p95"), ""),
)


def _claims(model: str, runs: Sequence[Run], evicting: Sequence[str]) -> list[Claim]:
    found = []
    for name in evicting:
        own = {"variant": name}
        for what, figure, goal in RATIOS:
            effect = Effect.of(runs, figure, own, {"variant": NATIVE})
            if effect is not None:
                found.append(effect.claim("Turns", f"{what} of {name}, of native", model, goal))
        for what, values, unit in (
            (f"facts, {name}, less native's", less_than_native(runs, name), "points"),
            (f"evicted for a token of output, {name}", [*map(evicted, pick(runs, **own))], ""),
        ):
            found.append(Claim.of("Turns", what, model, values, unit))
    for name in (NATIVE, *evicting, AMPLE):
        values = [*map(hits, pick(runs, variant=name))]
        found.append(Claim.of("Turns", f"prefix hits, {name}", model, values, "%"))
    return found


PART = Part("turns", comparisons, report, trained=True, varies=True)
