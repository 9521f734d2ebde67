"""Slices on a real engine: what the variant that forces the indirection evicts, and when."""

from __future__ import annotations

from typing import Any

import pytest

from vtoken.bench.engines import Cache, Engine, engine_args, model_folder
from vtoken.bench.overhead import BLOCK_SIZE, GROUPS
from vtoken.bench.slices import LIFE_STEPS, longest_tokens
from vtoken.bench.texts import texts

pytestmark = pytest.mark.vllm

STEPS = 40
COUNT = 4


def test_forced_indirection_evicts_one_token_a_request_and_nothing_in_its_steps() -> None:
    (variant,) = (v for v in GROUPS["indirection"] if v.forced)
    folder, longest = model_folder(None), longest_tokens(STEPS)
    size = Cache.fitting(folder, COUNT * longest, block_size=BLOCK_SIZE).num_bytes
    common = engine_args(
        str(folder), block_size=BLOCK_SIZE, max_model_len=2048, kv_cache_memory_bytes=size
    )
    engine = Engine("forced", variant.config, common, threads=1)
    try:
        engine.ask(variant.held(texts(None, COUNT, longest), STEPS))
        slices: list[dict[str, Any]] = [
            engine.ask({"slice": STEPS}) for _ in range(LIFE_STEPS // STEPS + 1)
        ]
    finally:
        engine.close()
    # Four requests in eight slices of life: every second slice replaces one of them.
    evicted = [found["evicted_tokens"] for found in slices]
    assert evicted == [COUNT, 0, 1, 0, 1, 0, 1, 0, 1]
    assert [found["recycled_slots"] for found in slices] == evicted
    for found in slices:
        assert found["tokens"] == COUNT * STEPS
        assert len(found["steps_ms"]) == STEPS
        assert found["hook_seconds"]["scheduler"] > 0
