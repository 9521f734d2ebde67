"""Wasted moves: the blocks that relocation freed and the tokens that it moved in vain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.core.harness import CoreEngine, make_engine
from tests.support.core.request_step import part_of, parts_of
from vtoken.core.runtime.held_request import WASTED_WITHIN_STEPS, LastMoves
from vtoken.policies import make_policy
from vtoken.wire import Status

EAGER: dict[str, Any] = {"interval_tokens": 0, "theta_f": 0.0, "low_watermark_blocks": 32}


@pytest.mark.parametrize(("gap", "wasted"), [(1, 1), (64, 2), (65, 1)])
def test_tokens_evicted_within_64_steps_of_their_move_were_moved_in_vain(
    gap: int, wasted: int
) -> None:
    """Blocks of 4 and a prompt of 16, of which 0 and 10 to 15 are kept. In step 2 their first block
    is emptied and the last but one is left open at its end: 0 and 11 move. 10 dies in step 3, 11
    in step 4. `gap` steps after the move, the policy keeps recent tokens only: 0 dies.
    """
    policy = {"name": "streaming_llm", "params": {"sinks": 1}}
    config = EAGER | {"policy": policy, "budget_tokens": 7, "evict_when": "always"}
    engine = CoreEngine(num_blocks=32, block_size=4, config=config, prefix_caching=False)
    runtime = engine.runtime
    engine.add("a", 16)
    engine.step()
    assert part_of(engine.step().requests, "a").moved_ids.tolist() == [0, 11]
    assert runtime.counters.reclamation.relocation_freed_blocks == 1
    assert runtime.counters.reclamation.reclaimed_blocks == 2  # and the second block, all dead
    runtime.active.config = replace(runtime.config, reclamation="paused")
    engine.steps(gap - 1)
    assert runtime.tables["a"].is_live(0)
    assert runtime.counters.reclamation.moved_then_evicted_tokens == (gap > 2)
    runtime.active.config = replace(runtime.config, policy=make_policy("sliding_window", {}))
    engine.step()
    assert not runtime.tables["a"].is_live(0)
    assert runtime.counters.reclamation.moved_tokens == 2
    assert runtime.counters.reclamation.moved_then_evicted_tokens == wasted


@given(
    st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, 30), max_size=8), st.integers(0, 50)),
        max_size=20,
    )
)
def test_moves_are_remembered_by_token_as_a_dictionary_would(
    happenings: list[tuple[bool, set[int], int]],
) -> None:
    moves, shadow, step = LastMoves(), dict[int, int](), 0
    for is_move, tokens, later in happenings:
        step += later
        ids = np.array(list(tokens), dtype=np.int64)
        if is_move:
            moves.moved(ids, step)
            shadow |= dict.fromkeys(tokens, step)
        else:
            recent = [t for t in tokens if t in shadow and step - shadow[t] <= WASTED_WITHIN_STEPS]
            assert moves.num_recent(ids, step) == len(recent)


def test_status_tells_what_an_engine_moved_for_nothing() -> None:
    """A random policy soon evicts what an eager planner has just moved."""
    config = EAGER | {
        "policy": {"name": "random", "params": {"sinks": 1, "recent": 2}},
        "budget_tokens": 16,
        "evict_when": "always",
        "interval_tokens": 3,
        "recycle": False,
        "low_watermark_blocks": 64,
    }
    with make_engine(block_size=4, prompt_tokens=40, prefix_tokens=0, config=config) as engine:
        shadow: dict[tuple[str, int], int] = {}
        wasted = 0
        for _ in range(60):
            engine.steps(1)
            runtime = engine.core.runtime
            plan = engine.core.newest_plan
            for request_id, part in parts_of(plan.requests).items():
                for token in part.evicted.tolist():
                    moved = shadow.pop((request_id, token), -1000)
                    wasted += plan.step - moved <= WASTED_WITHIN_STEPS
                for token in part.moved_ids.tolist():
                    shadow[request_id, token] = plan.step
        status: Status = engine.call("status")
        reclamation = status.reclamation
        assert reclamation.moved_then_evicted_tokens == wasted > 0
        assert reclamation.payback_steps == WASTED_WITHIN_STEPS
        freed = [
            event.data["freed_blocks"] - event.data["retaken_blocks"]
            for event in runtime.events.page(0, 10_000).events
            if event.kind == "relocation"
        ]
        assert reclamation.relocation_freed_blocks == sum(freed) > 0
        assert reclamation.relocation_freed_blocks <= reclamation.reclaimed_blocks


def test_an_engine_may_take_more_steps_than_32_bits_count() -> None:
    """A month at 1 ms a step."""
    moves = LastMoves()
    moves.moved(np.array([0, 1]), (1 << 31) - 2)
    moves.moved(np.array([2]), (1 << 31) + WASTED_WITHIN_STEPS)
    assert moves.num_recent(np.arange(3), (1 << 31) + WASTED_WITHIN_STEPS) == 1
