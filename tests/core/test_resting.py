"""Steps that pass without their tables: whoever asks gets what committing every step would give."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.core.engine import CoreEngine
from vtoken.config.request_rules import request_rules
from vtoken.config.values import merge_patch
from vtoken.errors import InvariantViolation

BUSY = {"name": "streaming_llm", "params": {"sinks": 1}}
IDLE = {"name": "none"}


def make(*, passes: bool, **options: Any) -> CoreEngine:
    settings = {"num_blocks": 24, "block_size": 4, "prefill_chunk_tokens": 9}
    config = {"budget_tokens": 8, "interval_tokens": 0}
    engine = CoreEngine(**settings | {"check_every_step": False, "config": config} | options)
    engine.passes_steps = passes
    return engine


def configure(engine: CoreEngine, **patch: Any) -> None:
    engine.runtime.state.config = merge_patch(
        engine.runtime.config, patch, num_blocks=engine.store.num_blocks, num_layers=4
    )


def seen(engine: CoreEngine) -> dict[str, Any]:
    """Everything that frames, plans and pages are made of."""
    runtime = engine.runtime
    tables = runtime.tables
    pool = tables.pool
    return {
        "tables": [
            (t.request_id, t.number, t.blocks, t.num_tokens, t.num_live, t.extent, t.virtual)
            for t in tables
        ],
        "slots": [t.slots_of(t.live_ids()).tolist() for t in tables],
        "pool": [pool.readers.tolist(), pool.live.tolist(), pool.holders.tolist()],
        "totals": (pool.num_used, pool.num_live),
        "owners": tables.owners().tolist(),
        "states": [
            (s.request_id, s.prefill_end, s.seed, s.admitted_step, sorted(s.readonly))
            for s in runtime.state.requests.values()
        ],
        "counters": {
            name: getattr(runtime.counters, name)
            for name in ("evicted_tokens", "preemptions", "finished_requests", "commits_checked")
        },
        "in flight": sorted(runtime.relocator.in_flight_blocks),
        "step": runtime.step,
    }


def act(engine: CoreEngine, move: str, number: int) -> None:
    """One move of the traffic; what it does follows from the engine's own state and `number`."""
    if move == "add":
        prefix = (None, "p", "q")[number % 3]
        prompt = 5 + number % 17
        own = {"vtoken_policy": "sliding_window"} if number % 11 == 0 else None
        if own is not None:
            engine.runtime.announce(f"r{number}", request_rules(own))
        engine.add(
            f"r{number}",
            prompt,
            max_tokens=3 + number % 29,
            prefix=prefix,
            prefix_tokens=prompt if prefix else 0,
        )
    elif move == "abort" and engine.running:
        engine.remove(engine.running[number % len(engine.running)].id)
    elif move == "preempt":
        engine.preempt_newest()
    elif move == "busy":
        configure(engine, policy=BUSY)
    elif move == "idle":
        configure(engine, policy=IDLE)
    elif move == "step":
        for _ in range(1 + number % 7):
            engine.step()


@pytest.mark.parametrize("seed", range(8))
def test_tables_that_catch_up_equal_tables_that_were_committed_every_step(seed: int) -> None:
    """Over admissions, prefix hits, chunks, preemptions, aborts, ends and live switches."""
    rng = random.Random(seed)
    lag = seed % 2
    eager, lazy = (make(passes=passes, worker_lag_steps=lag) for passes in (False, True))
    moves = ["step"] * 8 + ["add"] * 4 + ["abort", "preempt"] + ["idle"] * 2 + ["busy"]
    for number in range(100):
        move = rng.choice(moves)
        if move == "add" and len(eager.waiting) > 3:
            continue
        for engine in (eager, lazy):
            act(engine, move, number)
        if rng.random() < 0.2:
            assert seen(lazy) == seen(eager)
            lazy.check()
    assert seen(lazy) == seen(eager)
    lazy.check()
    assert eager.num_passed_steps == 0
    assert lazy.num_passed_steps > 20


def test_no_table_is_touched_while_nothing_may_evict_and_nobody_asks() -> None:
    engine = make(passes=True)
    engine.add("r", 6)
    engine.step()
    table = engine.runtime.tables["r"]
    for _ in range(10):
        engine.step()
    assert table.num_tokens == 6
    assert engine.runtime.tables["r"] is table
    assert (table.num_tokens, len(table.blocks)) == (16, 4)


def test_an_engine_rests_again_once_nobody_holds_holes() -> None:
    engine = make(passes=True)
    configure(engine, policy=BUSY)
    engine.add("r", 20, max_tokens=40)
    for _ in range(4):
        engine.step()
    assert engine.runtime.counters.evicted_tokens > 0
    configure(engine, policy=IDLE)
    engine.step()
    assert not engine.runtime.resting.active  # r has holes, or has moved
    engine.remove("r")
    engine.add("s", 20, max_tokens=40)
    engine.step()
    engine.step()
    assert engine.runtime.resting.active
    assert engine.num_passed_steps == 1
    engine.check()


def test_the_eviction_after_a_switch_sees_every_token_that_passed() -> None:
    engine = make(passes=True)
    engine.add("r", 6)
    for _ in range(12):
        engine.step()
    assert engine.num_passed_steps > 0
    configure(engine, policy=BUSY)
    plan = engine.step()
    assert plan.requests.of("r").num_tokens == 17
    assert len(plan.requests.of("r").evicted) == 17 - 8
    engine.check()


def test_a_requests_own_policy_ends_the_rest_of_all() -> None:
    engine = make(passes=True)
    engine.add("r", 6)
    engine.step()
    engine.step()
    assert engine.runtime.resting.active
    engine.runtime.announce("s", request_rules({"vtoken_policy": "sliding_window"}))
    engine.add("s", 20)
    for _ in range(4):
        engine.step()
        assert not engine.runtime.resting.active
    assert engine.runtime.counters.evicted_tokens > 0
    engine.check()


def test_an_eviction_that_nobody_noted_fails_the_check() -> None:
    engine = make(passes=True)
    configure(engine, policy=BUSY)
    engine.add("r", 20, max_tokens=40)
    for _ in range(4):
        engine.step()
    assert not engine.runtime.resting.all_positional
    engine.runtime.resting.all_positional = True
    with pytest.raises(InvariantViolation, match="none is known to"):
        engine.runtime.check()


def test_books_that_lost_tokens_are_a_violation_not_a_shorter_table() -> None:
    engine = make(passes=True)
    engine.add("r", 6)
    for _ in range(3):
        engine.step()
    engine.store.num_tokens = lambda _: 5
    with pytest.raises(InvariantViolation, match="r has 5 tokens, its table 6"):
        _ = engine.runtime.tables
    assert engine.runtime.counters.violations == 1
    assert np.count_nonzero(engine.runtime.tables.pool.readers) == 6
