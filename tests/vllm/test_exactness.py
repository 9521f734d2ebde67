"""Greedy tokens of the real engine under eviction, against the independent reference, float32.

Every variant of physical handling must give the same tokens: only the choice of victims may change
the output, never the placement of the remaining tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import pytest

from tests.support import reference
from tests.support.engines import EAGER, engine_args
from tests.support.observe import Observer

pytestmark = pytest.mark.vllm

NUM_NEW = 192
NUM_SHIPPED = 160  # under what ships
BUDGET = 128
PROMPTS = [reference.random_prompt(length, seed) for seed, length in enumerate((400, 90, 233, 310))]

Tokens = list[list[int]]


@pytest.fixture(scope="module")
def expected(hf_model: Any) -> Callable[..., Tokens]:
    """Reference tokens under streaming_llm; computed once for each interval and set of prompts.

    `draft`: the engine's, which are verified (`reference.trace`).
    """
    cache: dict[Any, Tokens] = {}

    def tokens(interval: int, prompts: Tokens = PROMPTS, draft: Sequence[list[int]] = ()) -> Tokens:
        key = (interval, tuple(map(tuple, prompts)))
        if key not in cache:
            evict = reference.streaming_llm(4, BUDGET, interval)
            cache[key] = [
                reference.generate(hf_model, prompt, NUM_NEW, evict, draft=expected)
                for prompt, expected in zip_longest(prompts, draft, fillvalue=())
            ]
        return cache[key]

    return tokens


def vtoken_args(interval: int, policy: str = "streaming_llm", **config: Any) -> dict[str, Any]:
    return engine_args(
        {
            "policy": {"name": policy},
            "budget_tokens": BUDGET,
            "evict_when": "always",
            "interval_tokens": interval,
            "verify_ratio": 1.0,
            **config,
        },
        check_every_step=True,
    )


@pytest.mark.parametrize(("block_size", "num_blocks"), [(32, 49), (16, 97), (64, 27)])
def test_tokens_under_what_ships_equal_the_reference_with_its_victims(
    block_size: int, num_blocks: int, engine: Any, greedy: Any, hf_model: Any
) -> None:
    prompts = [reference.random_prompt(n, n) for n in (400, 310, 290, 370)]
    args = engine_args({"verify_ratio": 1.0}, check_every_step=True)
    args |= {"block_size": block_size, "num_gpu_blocks_override": num_blocks}
    with engine(enable_prefix_caching=False, max_model_len=1024, **args) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, prompts, NUM_SHIPPED)
        counters, logs = observer.runtime.counters, observer.logs()
        assert observer.runtime.geometry.block_size == block_size
        assert counters.pressure.given_tokens == counters.tokens.evicted > 200
        assert counters.reclamation.relocations > 0
        assert (counters.invariants.violations, counters.requests.preempted) == (0, 0)
    for prompt, found, log in zip(prompts, tokens, logs, strict=True):
        assert found == reference.generate(
            hf_model, prompt, NUM_SHIPPED, reference.replay(log), draft=found
        )


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "recycling": (0, {"experiment": {"round_rule": "paper"}}),
    "recycling into many holes": (48, {"experiment": {"round_rule": "paper"}}),
    "priced: holes are measured, then closed": (48, {}),
    "plug without recycling": (48, {"recycle": False, "experiment": {"planner": "plug"}, **EAGER}),
    "pack without recycling": (48, {"recycle": False, "experiment": {"planner": "pack"}, **EAGER}),
    "plug, one source block a round": (40, {"recycle": False, **EAGER, "batch_size": 1}),
    "off (naive-evict)": (48, {"reclamation": "off"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_the_reference(
    name: str, engine: Any, greedy: Any, expected: Callable[..., Tokens]
) -> None:
    interval, config = VARIANTS[name]
    with engine(enable_prefix_caching=False, **vtoken_args(interval, **config)) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        counters = observer.runtime.counters
        assert counters.invariants.violations == 0
        assert counters.tokens.evicted > 700
        moves = name.startswith(("plug", "pack", "priced"))
        assert (counters.reclamation.recycled_slots > 0) == name.startswith(("recycling", "priced"))
        assert (counters.reclamation.relocations > 0) == moves
        if not moves:
            assert observer.steps_with_holes > 100
        if observer.steps_with_holes > 10:
            assert counters.reclamation.packed_tokens > observer.steps_with_holes
            assert observer.runtime.prices.hole_us > 0
    assert tokens == expected(interval, draft=tokens)


def test_holes_are_read_exactly_when_no_block_can_be_borrowed(
    engine: Any, greedy: Any, expected: Callable[..., Tokens]
) -> None:
    config = vtoken_args(48, recycle=False, reclamation="paused")
    with engine(enable_prefix_caching=False, **config) as llm:
        observer = Observer(llm)
        borrow, step = observer.runtime.store.borrow, [0]

        def borrow_sometimes(num_blocks: int) -> list[int]:
            """Nothing in two steps of three; half of the requested blocks in the third."""
            step[0] += 1
            return borrow(num_blocks // 2) if step[0] % 3 == 0 else []

        observer.runtime.store.borrow = borrow_sometimes
        tokens = greedy(llm, PROMPTS, NUM_NEW)
        assert step[0] > 100
        assert observer.steps_with_holes > 100
    assert tokens == expected(48, draft=tokens)


def test_eviction_bites(expected: Callable[..., Tokens], hf_model: Any) -> None:
    early = NUM_NEW // 2
    full = [reference.generate(hf_model, p, early, reference.full) for p in PROMPTS]
    for evicted, kept in zip(expected(0), full, strict=True):
        assert evicted[:early] != kept
    for at_once, later in zip(expected(0), expected(48), strict=True):
        assert at_once != later  # the moment of eviction matters too


def test_blocks_of_a_running_request_are_reused_by_another(
    engine: Any, greedy: Any, expected: Callable[..., Tokens]
) -> None:
    prompts = [reference.random_prompt(200 + 30 * i, 10 + i) for i in range(8)]
    full_blocks = sum(-(-(len(p) + NUM_NEW) // 32) for p in prompts)
    pool_blocks = 60
    assert pool_blocks < full_blocks / 2
    config = vtoken_args(
        0, **EAGER | {"low_watermark_blocks": 60, "headroom_blocks": 8, "batch_size": 32}
    )
    with engine(
        enable_prefix_caching=False,
        num_gpu_blocks_override=pool_blocks,
        max_model_len=1024,
        max_num_batched_tokens=512,
        **config,
    ) as llm:
        observer = Observer(llm)
        tokens = greedy(llm, prompts, NUM_NEW)
        counters = observer.runtime.counters
        assert counters.requests.preempted == 0
        assert counters.invariants.violations == 0
        reused = [owners for owners in observer.owners.values() if len(owners) > 1]
    assert len(reused) > 10
    assert tokens == expected(0, prompts, tokens)
