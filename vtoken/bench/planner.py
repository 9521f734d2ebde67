"""What the core costs a step, alone: no vLLM, no model, no worker.

Drives a `Runtime` as an engine would, requests that decode one token each, and times its calls:
`begin_step`, `required_extent` for every request, `commit_step`, `finish_step`. Allocation itself
is the engine's and is not timed. Every round of a scenario of plans starts from a fresh pool.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vtoken.bench.decoding import BLOCK_SIZE, SLACK_TOKENS, Decoding
from vtoken.bench.output import Table, finish, new_result

PAUSED = {"reclamation": "paused"}
EAGER = {"reclamation": "auto", "theta_f": 0.0}
GOALS_US = {"nothing due": 100.0, "plan": 2000.0}  # design figures, 64 requests of 4k tokens


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named situation; `measure` gives the timings of its steps, `goal` a key of `GOALS_US`."""

    name: str
    goal: str
    measure: Callable[[int, int, int], list[list[float]]]


def _warm(
    patch: dict[str, Any], *, fragment: bool, dense: bool = False
) -> Callable[[int, int, int], list[list[float]]]:
    """Steps in which nothing is due: tables are positional, or half-evicted, or packed again."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        engine = Decoding(num_requests, num_tokens, patch)
        if fragment:
            _evict_half(engine, num_tokens)
        if dense:
            engine.configure(EAGER | {"low_watermark_blocks": engine.num_blocks})
            engine.configure({"batch_size": engine.num_blocks, "recycle": False})
        engine.steps(8)
        return engine.steps(min(count, SLACK_TOKENS - 32))

    return measure


def _evict_half(engine: Decoding, num_tokens: int) -> None:
    """Every request loses a random half of its tokens; afterwards nothing is due."""
    policy = {"name": "random", "params": {"seed": 1}}
    engine.configure({"policy": policy, "budget_tokens": num_tokens // 2, "interval_tokens": 0})
    engine.step(engine.ids)
    engine.configure({"interval_tokens": num_tokens})


def _steady(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
    """One eviction and one recycled slot a request in every step."""
    engine = Decoding(num_requests, num_tokens, PAUSED)
    _evict_half(engine, num_tokens)
    engine.configure({"interval_tokens": 0, "policy": {"name": "streaming_llm"}})
    engine.steps(8)
    return engine.steps(min(count, SLACK_TOKENS - 32))


def _plan(planner: str, batch_size: int | None) -> Callable[[int, int, int], list[list[float]]]:
    """Eager rounds of at most B sources on half-empty blocks; None: all at once."""

    def measure(num_requests: int, num_tokens: int, count: int) -> list[list[float]]:
        timings: list[list[float]] = []
        while len(timings) < min(count, 40):
            engine = Decoding(num_requests, num_tokens, PAUSED)
            _evict_half(engine, num_tokens)
            engine.configure(
                EAGER
                | {
                    "planner": planner,
                    "low_watermark_blocks": engine.num_blocks,
                    "headroom_blocks": engine.num_blocks // 2,
                    "batch_size": min(batch_size or engine.num_blocks, engine.num_blocks),
                    "recycle": False,
                }
            )
            moved = engine.runtime.counters.relocations
            rounds = 4 if batch_size else 1
            timings += engine.steps(rounds)
            if engine.runtime.counters.relocations == moved:
                raise RuntimeError("a round planned nothing: the figures would mean nothing")
            if batch_size is None and len(timings) >= 8:
                break
        return timings

    return measure


SCENARIOS = (
    Scenario("positional, nothing due", "nothing due", _warm({}, fragment=False)),
    Scenario("evicted, dense", "nothing due", _warm({}, fragment=True, dense=True)),
    Scenario("holes, appending", "", _warm(PAUSED | {"recycle": False}, fragment=True)),
    Scenario("holes, recycling", "", _warm(PAUSED, fragment=True)),
    Scenario("1 eviction + 1 recycled slot a request", "", _steady),
    Scenario("plug, B = 32", "plan", _plan("plug", 32)),
    Scenario("plug, B = 256", "plan", _plan("plug", 256)),
    Scenario("plug, unbounded", "", _plan("plug", None)),
    Scenario("pack, B = 32", "plan", _plan("pack", 32)),
    Scenario("pack, B = 256", "plan", _plan("pack", 256)),
    Scenario("pack, unbounded", "", _plan("pack", None)),
)
PARTS = ("begin", "ask", "commit", "finish")


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the steps, in µs; `total` is of whole steps, not the sum of medians."""

    scenario: str
    requests: int
    tokens: int
    steps: int
    begin: float
    ask: float
    commit: float
    finish: float
    total: float
    p95: float
    goal: float | None

    @classmethod
    def of(cls, scenario: Scenario, requests: int, tokens: int, us: list[list[float]]) -> Row:
        parts = np.array(us)
        totals = parts.sum(axis=1)
        begin, ask, commit, finish = np.median(parts, axis=0).tolist()
        at_goal = (requests, tokens) == (64, 4096)
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
            float(np.percentile(totals, 95)),
            GOALS_US.get(scenario.goal) if at_goal else None,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--steps", type=int, default=200, help="timed steps a scenario")
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
    result.tables = [_table(rows, r, t) for r in requests for t in tokens]
    result.raw = [asdict(row) for row in rows]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def _table(rows: list[Row], requests: int, tokens: int) -> Table:
    table = Table(
        f"{requests} requests of {tokens:,} tokens: µs a step",
        ["situation", *PARTS, "step", "p95", "a request", "goal"],
        [],
    )
    for row in rows:
        if (row.requests, row.tokens) != (requests, tokens):
            continue
        goal = None
        if row.goal is not None:
            goal = f"{row.goal:,.0f} {'met' if row.total <= row.goal else 'missed'}"
        each = [row.begin, row.ask, row.commit, row.finish, row.total, row.p95]
        table.rows.append([row.scenario, *each, row.total / row.requests, goal])
    return table
