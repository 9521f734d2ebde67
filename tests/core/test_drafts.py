"""Drafts in the core: rejected ones leave nothing behind, and F stays where it is without them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine

STEPS, SETTLED = 160, 20  # steps, and those before F is measured


def mean_f(policy: str, interval: int, max_drafts: int, num_right: int) -> float:
    """F over the steps of eight requests of 256 live tokens, under default gates and prices."""
    engine = CoreEngine(
        num_blocks=200,
        block_size=16,
        max_drafts=max_drafts,
        check_every_step=False,
        config={
            "policy": {"name": policy},
            "budget_tokens": 256,
            "evict_when": "always",
            "interval_tokens": interval,
            "verify_ratio": 0.0,
        },
    )
    engine.worker.hole_us, engine.worker.copy_us = 3, 1
    engine.draft = lambda _: (max_drafts, num_right)
    for i in range(8):
        engine.add(f"r{i}", 300 + i, seed=i)
    found = []
    for step in range(STEPS):
        engine.step()
        if step >= SETTLED:
            found.append(engine.runtime.tables.pool.fragmentation)
    assert engine.runtime.counters.invariants.violations == 0
    assert engine.runtime.counters.tokens.evicted > 8 * STEPS // 2
    return float(np.mean(found))


@pytest.mark.parametrize("interval", [0, 32])
def test_rounds_keep_f_low_without_recycling_drafts(interval: int) -> None:
    alone = mean_f("random", interval, 0, 0)
    for num_right in (0, 4):
        assert mean_f("random", interval, 4, num_right) < alone + 0.03


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_request_keeps_the_blocks_of_its_drafts_and_of_its_drafter_and_no_more(
    lookahead: int,
) -> None:
    engine = CoreEngine(num_blocks=16, block_size=4, max_drafts=4, lookahead=lookahead)
    engine.draft = lambda _: (4, 0)
    engine.add("a", 8)
    engine.step()
    for num_tokens in range(9, 30):
        engine.step()
        table = engine.runtime.tables["a"]
        assert (table.num_tokens, table.extent) == (num_tokens, num_tokens)
        assert table.num_blocks == -(-(num_tokens + 4 + lookahead) // 4)
        engine.check()


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_token_without_drafts_takes_no_hole_where_a_drafter_computes_behind_it(
    lookahead: int,
) -> None:
    engine = CoreEngine(
        num_blocks=64,
        block_size=4,
        max_drafts=3,
        lookahead=lookahead,
        config={
            "policy": {"name": "random"},
            "budget_tokens": 24,
            "evict_when": "always",
            "interval_tokens": 4,
            "experiment": {"round_rule": "paper"},
        },
    )
    engine.draft = lambda _: (0, 0)
    engine.add("a", 40)
    for _ in range(40):
        engine.step()
    counters = engine.runtime.counters
    assert counters.tokens.evicted > 20
    assert (counters.reclamation.recycled_slots > 0) == (lookahead == 0)
