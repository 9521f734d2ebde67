"""Slices on a real engine: the evictions of the variant that forces the indirection."""

from __future__ import annotations

from contextlib import closing

import pytest

from vtoken_bench.engines import Engine
from vtoken_bench.overhead import GROUPS
from vtoken_bench.slices import LIFE_STEPS, longest_tokens
from vtoken_bench.target import Target, model_folder
from vtoken_bench.texts import texts

pytestmark = pytest.mark.vllm

STEPS = 40
COUNT = 4


def test_forced_indirection_evicts_one_token_a_request_and_nothing_in_its_steps() -> None:
    (variant,) = (v for v in GROUPS["indirection"] if v.forced)
    folder, longest = model_folder(None), longest_tokens(STEPS)
    target = Target(threads=1)
    size = target.stock_block_size
    blocks = target.num_blocks(folder, COUNT * longest, block_size=size)
    arguments = target.engine_args(folder, block_size=size, max_model_len=2048, num_blocks=blocks)
    settings = target.settings()
    with closing(
        Engine(variant.name, variant.config, arguments, threads=1, settings=settings)
    ) as engine:
        engine.ask(variant.hold_message(texts(None, COUNT, longest), STEPS))
        slices = [engine.ask({"slice": STEPS}) for _ in range(LIFE_STEPS // STEPS + 1)]
    # Four requests in eight slices of life: every second slice replaces one of them.
    evicted = [found["evicted_tokens"] for found in slices]
    assert evicted == [COUNT, 0, 1, 0, 1, 0, 1, 0, 1]
    assert [found["recycled_slots"] for found in slices] == evicted
    for found in slices:
        assert found["tokens"] == COUNT * STEPS
        assert len(found["steps_ms"]) == STEPS
        assert found["hook_seconds"]["scheduler"] > 0
