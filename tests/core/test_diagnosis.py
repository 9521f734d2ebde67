"""The diagnosis says what the planner would do: fragmented where it can help, full where not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.harness import make_engine
from vtoken.wire import Operation, Status


def status_of(**options: Any) -> tuple[Any, Status]:
    engine = make_engine(**options)
    engine.steps(60)
    status: Status = engine.call("status")
    return engine, status


BASE: dict[str, Any] = {
    "num_blocks": 96,
    "block_size": 4,
    "concurrency": 4,
    "prompt_tokens": 30,
    "max_tokens": 200,
    "prefix_tokens": 0,
}
EVICTING = {
    "policy": {"name": "random", "params": {"sinks": 1, "recent": 2}},
    "budget_tokens": 16,
    "interval_tokens": 4,
    "recycle": False,
    "headroom_blocks": 48,
}


def test_idle_says_so() -> None:
    engine = make_engine(**BASE | {"concurrency": 0})
    try:
        status: Status = engine.call("status")
        assert status.fragmentation.sentence.startswith("Idle")
        assert status.fragmentation.reclaimable_blocks == 0
    finally:
        engine.close()


@pytest.mark.parametrize("watermark", [0, 95])
def test_the_offer_is_what_compacting_then_frees(watermark: int) -> None:
    config = EVICTING | {"reclamation": "paused", "low_watermark_blocks": watermark}
    engine, status = status_of(**BASE, config=config)
    try:
        told = status.fragmentation
        assert told.reclaimable_blocks > 0
        assert told.cause == ("fragmented" if watermark else "ok")
        assert f"would free {told.reclaimable_blocks:,} blocks" in told.sentence
        operation: Operation = engine.call("compact", dry_run=True)
        assert operation.plan is not None
        assert operation.plan.freed_blocks == told.reclaimable_blocks
        assert operation.plan.moved_tokens == told.reclaim_moved_tokens
    finally:
        engine.close()


def test_a_pool_full_of_live_tokens_is_full_not_fragmented() -> None:
    engine, status = status_of(**BASE, config={"headroom_blocks": 48})
    try:
        assert status.fragmentation.cause == "full"
        assert status.fragmentation.sentence.startswith("Full")
    finally:
        engine.close()
