"""Slices on a real engine: the evictions of the variant that forces the indirection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vtoken_bench.engines import Engine
from vtoken_bench.overhead import GROUPS
from vtoken_bench.slices import LIFE_STEPS, Variant, longest_check_tokens, longest_tokens
from vtoken_bench.target import Target, model_folder
from vtoken_bench.texts import texts

pytestmark = pytest.mark.vllm

STEPS = 40
COUNT = 4


@contextmanager
def holding(variant: Variant, *, check_tokens: int = 0) -> Iterator[Engine]:
    """An engine of `variant` that holds COUNT requests; `check_tokens`: the longest check's."""
    folder, longest = model_folder(None), longest_tokens(STEPS)
    target = Target(threads=1)
    size = target.stock_block_size
    num_blocks = target.num_blocks(folder, COUNT * longest + 2 * check_tokens, block_size=size)
    common = target.engine_args(
        folder,
        block_size=size,
        max_model_len=max(2048, check_tokens + 1),
        num_blocks=num_blocks,
    )
    engine = Engine(
        variant.name, variant.config, common, threads=target.threads, settings=target.settings()
    )
    try:
        prompts = texts(None, COUNT, max(longest, check_tokens))
        engine.ask(variant.hold_message(prompts, STEPS))
        yield engine
    finally:
        engine.close()


def test_forced_indirection_evicts_one_token_a_request_and_nothing_in_its_steps() -> None:
    (variant,) = (v for v in GROUPS["indirection"] if v.forced)
    with holding(variant) as engine:
        slices: list[dict[str, Any]] = [
            engine.ask({"slice": STEPS}) for _ in range(LIFE_STEPS // STEPS + 1)
        ]
    # Four requests in eight slices of life: every second slice replaces one of them.
    evicted = [found["evicted_tokens"] for found in slices]
    assert evicted == [COUNT, 0, 1, 0, 1, 0, 1, 0, 1]
    assert [found["recycled_slots"] for found in slices] == evicted
    for found in slices:
        assert found["tokens"] == COUNT * STEPS
        assert len(found["steps_ms"]) == STEPS
        assert found["hook_seconds"]["scheduler"] > 0


def test_held_requests_last_until_they_are_replaced_while_checks_run() -> None:
    (variant,) = (v for v in GROUPS["canary"] if v.checked)
    with holding(variant, check_tokens=longest_check_tokens(STEPS)) as engine:
        for _ in range(LIFE_STEPS // STEPS + 2):
            assert engine.ask({"slice": STEPS})["tokens"] == COUNT * STEPS
