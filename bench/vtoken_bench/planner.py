"""Cost of the core per step, alone: no vLLM, no model, no worker.

The bench drives a `Runtime` as an engine does, with requests that decode one token each, and times
`begin_step`, `required_extent` for every request, `commit_step` and `finish_step`. Block allocation
is the engine's work and is not timed. Every round of a planning scenario starts from a new pool.

No blocks are borrowed for packing unless the scenario says so: only the CPU worker needs them.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vtoken_bench.decoding import BLOCK_SIZE, DEFAULT_BLOCKS, SLACK_TOKENS, Blocks, Decoding
from vtoken_bench.output import Table, finish, new_result

PAUSED = {"reclamation": "paused"}
EAGER = {"reclamation": "auto", "theta_f": 0.0}
PERIOD = 32  # steps between evictions of a request, and tokens per eviction
WARM_STEPS = 8
Measure = Callable[[int, int, int], list[list[float]]]


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal in µs per step.

    `before`: of 21 November 2026, before tables were columns, with blocks borrowed for packing.
    """

    requests: int
    tokens: int
    before: float | None
    goal: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named situation; `measure` returns timings of its steps, or means over a period."""

    name: str
    measure: Measure
    goals: tuple[Goal, ...] = ()

    def goal(self, requests: int, tokens: int) -> Goal | None:
        return next((g for g in self.goals if (g.requests, g.tokens) == (requests, tokens)), None)


def quiet(
    patch: dict[str, Any],
    *,
    fragment: bool,
    dense: bool = False,
    borrows_blocks: bool = False,
    blocks: Blocks = DEFAULT_BLOCKS,
) -> Measure:
    """Steps with nothing due: tables are positional, half-evicted (`fragment`) or `dense` again."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        engine = Decoding(
            num_requests, num_tokens, patch, borrows_blocks=borrows_blocks, blocks=blocks
        )
        if fragment:
            evict_half(engine, num_tokens)
        if dense:
            engine.configure(EAGER | {"low_watermark_blocks": engine.num_blocks})
            engine.configure({"batch_size": engine.num_blocks, "recycle": False})
        engine.steps(WARM_STEPS)
        return engine.steps(min(count, SLACK_TOKENS - 32))

    return measure


def evict_half(engine: Decoding, num_tokens: int, num_steps: int = 1) -> None:
    """Evict a random half of each request's tokens; afterwards nothing is due.

    The requests are spread over `num_steps` steps.
    """
    policy = {"name": "random", "params": {"seed": 1}}
    engine.configure({"policy": policy, "budget_tokens": num_tokens // 2, "interval_tokens": 0})
    for i in range(num_steps):
        engine.step(engine.ids[i::num_steps])
    engine.configure({"interval_tokens": num_tokens})


def every_step(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
    """Every step evicts one token and recycles one slot per request."""
    engine = Decoding(num_requests, num_tokens, PAUSED, borrows_blocks=False)
    evict_half(engine, num_tokens)
    engine.configure({"interval_tokens": 0, "policy": {"name": "streaming_llm"}})
    engine.steps(WARM_STEPS)
    return engine.steps(min(count, SLACK_TOKENS - 32))


def in_rounds(policy: str, *, blocks: Blocks = DEFAULT_BLOCKS) -> Measure:
    """Evict 32 tokens of each request every 32 steps, spread over the steps: means per period."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        engine = rounds_of_evictions(policy, num_requests, num_tokens, blocks=blocks)
        periods = min(max(2, count // PERIOD), (SLACK_TOKENS - 3 * PERIOD) // PERIOD)
        before = engine.runtime.counters.tokens.evicted
        us = np.array(engine.steps(periods * PERIOD))
        evicted = engine.runtime.counters.tokens.evicted - before
        if evicted != num_requests * periods * PERIOD:
            due = num_requests * periods * PERIOD
            raise RuntimeError(f"{evicted} tokens were evicted, not {due}: timings are invalid")
        means: list[list[float]] = us.reshape(periods, PERIOD, -1).mean(axis=1).tolist()
        return means

    return measure


def rounds_of_evictions(
    policy: str,
    num_requests: int,
    num_tokens: int,
    *,
    mirrored: bool = False,
    blocks: Blocks = DEFAULT_BLOCKS,
) -> Decoding:
    """An engine that evicts 32 tokens of each request every 32 steps, after its first period.

    Scores are random and the same for every request.
    """
    scores = None
    if policy != "streaming_llm":
        scores = np.random.default_rng(1).random(num_tokens + SLACK_TOKENS, dtype=np.float32)
    engine = Decoding(
        num_requests,
        num_tokens,
        PAUSED,
        borrows_blocks=False,
        mirrored=mirrored,
        scores=scores,
        blocks=blocks,
    )
    evict_half(engine, num_tokens, PERIOD)
    engine.configure({"interval_tokens": PERIOD - 1, "policy": {"name": policy}})
    engine.steps(PERIOD)
    return engine


def plan(planner: str, batch_size: int | None) -> Measure:
    """Eager rounds with at most `batch_size` source blocks, half-empty; None: no limit."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        timings: list[list[float]] = []
        while len(timings) < min(count, 40):
            engine = Decoding(num_requests, num_tokens, PAUSED, borrows_blocks=False)
            evict_half(engine, num_tokens)
            engine.configure(
                EAGER
                | {
                    "experiment": {"planner": planner},
                    "low_watermark_blocks": engine.num_blocks,
                    "headroom_blocks": engine.num_blocks // 2,
                    "batch_size": min(batch_size or engine.num_blocks, engine.num_blocks),
                    "recycle": False,
                }
            )
            moved = engine.runtime.counters.reclamation.relocations
            rounds = 4 if batch_size else 1
            timings += engine.steps(rounds)
            if engine.runtime.counters.reclamation.relocations == moved:
                raise RuntimeError("a round planned nothing: timings are invalid")
            if batch_size is None and len(timings) >= 8:
                break
        return timings

    return measure


SCENARIOS = (
    Scenario("nothing due", quiet({}, fragment=False), (Goal(64, 4096, 66, 15),)),
    Scenario("evicted, dense", quiet({}, fragment=True, dense=True), (Goal(64, 4096, 141, 20),)),
    Scenario("holes, appending", quiet(PAUSED | {"recycle": False}, fragment=True)),
    Scenario(
        "holes, recycling",
        quiet(PAUSED, fragment=True),
        (Goal(64, 4096, 357, 25), Goal(256, 16384, 1500, 100)),
    ),
    Scenario(
        "holes, recycling, blocks borrowed for packing",
        quiet(PAUSED, fragment=True, borrows_blocks=True),
    ),
    Scenario("1 eviction + 1 recycled slot a request", every_step, (Goal(64, 4096, 3800, 400),)),
    Scenario(
        "32 evictions every 32 steps, streaming_llm, mean",
        in_rounds("streaming_llm"),
        (Goal(64, 4096, None, 60),),
    ),
    Scenario(
        "32 evictions every 32 steps, h2o, mean", in_rounds("h2o"), (Goal(64, 4096, None, 60),)
    ),
    Scenario("plug, B = 32", plan("plug", 32)),
    Scenario("plug, B = 256", plan("plug", 256), (Goal(64, 4096, 1700, 300),)),
    Scenario("plug, unbounded", plan("plug", None), (Goal(64, 4096, 62_000, 3000),)),
    Scenario("pack, B = 32", plan("pack", 32)),
    Scenario("pack, B = 256", plan("pack", 256)),
    Scenario("pack, unbounded", plan("pack", None)),
)
PARTS = ("begin", "ask", "commit", "finish")


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the steps, in µs; `total` is that of entire steps, not a sum of medians."""

    scenario: str
    requests: int
    tokens: int
    steps: int
    begin: float
    ask: float
    commit: float
    finish: float
    total: float
    least: float
    p95: float
    before: float | None
    goal: float | None

    @classmethod
    def of(cls, scenario: Scenario, requests: int, tokens: int, us: list[list[float]]) -> Row:
        parts = np.array(us)
        totals = parts.sum(axis=1)
        begin, ask, commit, finish = np.median(parts, axis=0).tolist()
        goal = scenario.goal(requests, tokens)
        return cls(
            scenario.name,
            requests,
            tokens,
            len(us),
            begin,
            ask,
            commit,
            finish,
            float(np.median(totals)),
            float(totals.min()),
            float(np.percentile(totals, 95)),
            None if goal is None else goal.before,
            None if goal is None else goal.goal,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--steps", type=int, default=200, help="timed steps per scenario")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    requests, tokens = args.requests, args.tokens
    if args.quick:
        requests, tokens, args.steps = [1, 64], [4096], 60
    setup = {"block size": BLOCK_SIZE, "timed steps": args.steps}
    result = new_result("planner", "make bench-planner", setup)
    rows = []
    for num_requests in requests:
        for num_tokens in tokens:
            for scenario in SCENARIOS:
                if args.only not in scenario.name:
                    continue
                gc.collect()
                us = scenario.measure(num_requests, num_tokens, args.steps)
                rows.append(Row.of(scenario, num_requests, num_tokens, us))
    result.tables = [_goals(rows), *[_table(rows, r, t) for r in requests for t in tokens]]
    result.raw = [asdict(row) for row in rows]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _goals(rows: list[Row]) -> Table:
    table = Table(
        "Goals: µs a step, CPU time",
        ["situation", "requests", "tokens", "before", "goal", "median", "minimum", ""],
        [],
    )
    for row in rows:
        if row.goal is not None:
            met = "met" if row.total <= row.goal else "missed"
            times = [row.before, row.goal, row.total, row.least]
            table.rows.append([row.scenario, row.requests, row.tokens, *times, met])
    return table


def _table(rows: list[Row], requests: int, tokens: int) -> Table:
    table = Table(
        f"{requests} requests of {tokens:,} tokens: µs a step, medians",
        ["situation", *PARTS, "step", "minimum", "p95", "a request"],
        [],
    )
    for row in rows:
        if (row.requests, row.tokens) != (requests, tokens):
            continue
        each = [row.begin, row.ask, row.commit, row.finish, row.total, row.least, row.p95]
        table.rows.append([row.scenario, *each, row.total / row.requests])
    return table
