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
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from vtoken_bench.decoding import BLOCK_SIZE, SLACK_TOKENS, Decoding
from vtoken_bench.output import Cell, Table, finish, new_result

PAUSED = {"reclamation": "paused"}
EAGER = {"reclamation": "auto", "theta_f": 0.0}
PERIOD = 32  # steps between evictions of a request, and tokens per eviction
WARM_STEPS = 8
Measure = Callable[[int, int, int], list[list[float]]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named situation; `measure` returns timings of its steps, or means over a period.

    `goals`: µs a step, by requests and tokens.
    """

    name: str
    measure: Measure
    goals: dict[tuple[int, int], float] = field(default_factory=dict)


def quiet(
    patch: dict[str, Any],
    *,
    fragment: bool,
    dense: bool = False,
    borrows_blocks: bool = False,
) -> Measure:
    """Steps with nothing due: tables are positional, half-evicted (`fragment`) or `dense` again."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        engine = Decoding(num_requests, num_tokens, patch, borrows_blocks=borrows_blocks)
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


def in_rounds(policy: str) -> Measure:
    """Evict 32 tokens of each request every 32 steps, spread over the steps: means per period."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        engine = rounds_of_evictions(policy, num_requests, num_tokens)
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
        scores=scores,
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
    Scenario("nothing due", quiet({}, fragment=False), {(64, 4096): 15}),
    Scenario("evicted, dense", quiet({}, fragment=True, dense=True), {(64, 4096): 20}),
    Scenario("holes, appending", quiet(PAUSED | {"recycle": False}, fragment=True)),
    Scenario(
        "holes, recycling",
        quiet(PAUSED, fragment=True),
        {(64, 4096): 25, (256, 16384): 100},
    ),
    Scenario(
        "holes, recycling, blocks borrowed for packing",
        quiet(PAUSED, fragment=True, borrows_blocks=True),
    ),
    Scenario("1 eviction + 1 recycled slot a request", every_step, {(64, 4096): 400}),
    Scenario(
        "32 evictions every 32 steps, streaming_llm, mean",
        in_rounds("streaming_llm"),
        {(64, 4096): 60},
    ),
    Scenario("32 evictions every 32 steps, h2o, mean", in_rounds("h2o"), {(64, 4096): 60}),
    Scenario("plug, B = 32", plan("plug", 32)),
    Scenario("plug, B = 256", plan("plug", 256), {(64, 4096): 300}),
    Scenario("plug, unbounded", plan("plug", None), {(64, 4096): 3000}),
    Scenario("pack, B = 32", plan("pack", 32)),
    Scenario("pack, B = 256", plan("pack", 256)),
    Scenario("pack, unbounded", plan("pack", None)),
)
PARTS = ("begin", "ask", "commit", "finish")


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
    result.raw = []
    for num_requests, num_tokens in product(requests, tokens):
        rows: list[dict[str, Cell]] = []
        for scenario in SCENARIOS:
            if args.only not in scenario.name:
                continue
            gc.collect()
            us = scenario.measure(num_requests, num_tokens, args.steps)
            goal = scenario.goals.get((num_requests, num_tokens))
            rows.append({"situation": scenario.name, **_figures(us, num_requests, goal)})
        title = f"{num_requests} requests of {num_tokens:,} tokens: µs a step, medians"
        result.tables.append(Table.of(title, rows))
        result.raw += rows
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _figures(us: list[list[float]], num_requests: int, goal: float | None) -> dict[str, Cell]:
    """Medians over the steps, in µs; of entire steps, not sums of the parts' medians."""
    parts = np.array(us)
    totals = parts.sum(axis=1)
    step = float(np.median(totals))
    return {
        **dict(zip(PARTS, np.median(parts, axis=0).tolist(), strict=True)),
        "step": step,
        "minimum": float(totals.min()),
        "p95": float(np.percentile(totals, 95)),
        "a request": step / num_requests,
        "goal": goal,
        "": None if goal is None else "met" if step <= goal else "missed",
    }
