"""Long seeded runs under heavy traffic: what short random sequences reach too seldom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine
from vtoken.core.config.values import merge_patch
from vtoken.core.runtime import shortage

TOKEN_BYTES = 512  # of the core engine's four layers


def soak(seed: int, num_steps: int = 250) -> CoreEngine:
    """Random traffic and random changes on a random pool, everything checked at every step. Now and
    then it is quiet, so that parked tokens come back.
    """
    rng = np.random.default_rng(seed)
    num_blocks, size = int(rng.integers(6, 20)), int(rng.integers(2, 5))
    engine = CoreEngine(
        num_blocks=num_blocks,
        block_size=size,
        prefill_chunk_tokens=int(rng.choice([3, 7, 100])),
        worker_lag_steps=int(rng.integers(0, 2)),
        config={"theta_f": 0.0, "low_watermark_blocks": num_blocks, "interval_tokens": 0}
        | {"restore_after_ms": 0}
        | random_patch(rng, num_blocks)
        | {"evict_when": "pressure", "reclamation": "auto", "park_bytes": 1 << 20},
    )
    most = (num_blocks - 1) * size
    quiet_until = 0
    for i in range(num_steps):
        if rng.random() < 0.05:
            quiet_until = i + 8
            while len(engine.running) > 1:
                engine.remove(engine.running[-1].id)
            while engine.waiting:
                engine.remove(engine.waiting[0].id)
            configure(engine, AMPLE)
        if i >= quiet_until and len(engine.waiting) < 3 and rng.random() < 0.4:
            prompt = int(rng.integers(1, max(2, most // 2)))
            prefix = str(rng.choice(["p", "q"])) if rng.random() < 0.7 else None
            engine.add(
                f"r{i}",
                prompt,
                max_tokens=int(rng.integers(5, 60)),
                prefix=prefix,
                prefix_tokens=prompt - int(rng.integers(0, prompt + 1)) // 2,
                seed=i,
            )
        if rng.random() < 0.05:
            configure(engine, random_patch(rng, num_blocks))
        if rng.random() < 0.05:
            ids = [None, *[t.request_id for t in engine.runtime.tables]]
            request_id = ids[rng.integers(0, len(ids))]
            engine.runtime.operations.add("t", request_id, int(rng.integers(1, 9)), False)
        if rng.random() < 0.03:
            engine.preempt_newest()
        if rng.random() < 0.05 and engine.running:
            table = engine.runtime.tables.get(engine.running[0].id)
            if table is not None:
                engine.runtime.restorer.ask(table.request_id)
        if rng.random() < 0.02 and engine.running:
            table = engine.runtime.tables.get(engine.running[-1].id)
            if table is not None:
                first = int(rng.integers(0, table.num_tokens))
                engine.runtime.requests.forget_tokens(table.request_id, ((first, first + 2),))
        if rng.random() < 0.02 and engine.running:
            engine.remove(engine.running[rng.integers(0, len(engine.running))].id)
        engine.step()
        engine.check()
    return engine


AMPLE = {
    "evict_when": "pressure",
    "reclamation": "auto",
    "low_watermark_blocks": 0,
    "headroom_blocks": 0,
}


def configure(engine: CoreEngine, patch: dict[str, Any]) -> None:
    runtime = engine.runtime
    num_blocks = runtime.geometry.num_blocks
    runtime.active.config = merge_patch(runtime.config, patch, num_blocks=num_blocks, num_layers=4)


def random_patch(rng: np.random.Generator, num_blocks: int) -> dict[str, Any]:
    policies: list[dict[str, Any]] = [
        {"name": "streaming_llm", "params": {"sinks": 1}},
        {"name": "sliding_window"},
        {"name": "random", "params": {"sinks": 1, "recent": 1}},
        {"name": "random", "params": {"sinks": 0, "recent": 1}},
        {"name": "h2o", "params": {"sinks": 1, "recent_ratio": 0.3}},
    ]
    return {
        "policy": policies[rng.integers(0, len(policies))],
        "experiment": {"planner": str(rng.choice(["pack", "plug"]))},
        "recycle": bool(rng.random() < 0.6),
        "reclamation": str(rng.choice(["auto", "auto", "auto", "off", "paused"])),
        "evict_when": str(rng.choice(["pressure", "always"])),
        "budget_tokens": int(rng.integers(2, 16)),
        "interval_tokens": int(rng.integers(0, 4)),
        "batch_size": int(rng.integers(1, num_blocks)),
        "headroom_blocks": int(rng.integers(0, num_blocks // 2 + 1)),
        "park_bytes": int(rng.choice([0, 4 * TOKEN_BYTES, 20 * TOKEN_BYTES, 1 << 20, 1 << 20])),
    }


@pytest.mark.parametrize("seed", range(1, 9))
def test_heavy_traffic_keeps_every_live_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A shortage is near for 32 tokens of growth, more than such a pool has when it is quiet.
    monkeypatch.setattr(shortage, "WARM_QUERIES", 2)
    engine = soak(seed)
    counters = engine.runtime.counters
    assert counters.tokens.evicted > counters.pressure.given_tokens > 0
    assert counters.tokens.evicted > 100
    assert counters.invariants.violations == 0
    assert engine.worker.reads_checked > 500
    assert counters.parking.copied_tokens > 100
    assert counters.parking.restored_tokens > 0
    assert engine.runtime.parking.fault == ""
