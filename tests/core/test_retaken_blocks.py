"""Relocation does not thrash: no block is freed only for the next token to take it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.core.test_planner import next_takes_block
from tests.support.core.harness import LiveEngine, make_engine


@contextmanager
def running(
    planner: str, budget: int, interval: int, seed: int, *, recycle: bool
) -> Iterator[LiveEngine]:
    """Four prompts of nine full, hashed blocks, which a policy fills with holes; eager rounds."""
    with make_engine(
        num_blocks=256,
        block_size=16,
        config={
            "policy": {"name": "random", "params": {"seed": seed, "recent": 4, "sinks": 1}},
            "budget_tokens": budget,
            "evict_when": "always",
            "interval_tokens": interval,
            "theta_f": 0.0,
            "low_watermark_blocks": 256,
            "headroom_blocks": 16,
            "experiment": {"planner": planner},
            "recycle": recycle,
        },
        concurrency=4,
        prompt_tokens=150,
        prefix_tokens=0,
        max_tokens=400,
        check_every_step=True,
    ) as live:
        live.steps(1)
        yield live


def num_evictions(live: LiveEngine) -> int:
    events = live.runtime.events.page(0, 100_000).events
    return sum(event.data["requests"] for event in events if event.kind == "eviction")


@pytest.mark.parametrize(("budget", "interval"), [(147, 7), (140, 8), (101, 15)])
def test_relocations_are_not_much_more_than_evictions(budget: int, interval: int) -> None:
    """At most one an eviction, and one for each read-only block that is emptied once and for all.
    A planner that does not count the next token's place moves one token a step."""
    with running("plug", budget, interval, 25, recycle=False) as live:
        readonly: set[tuple[str, int]] = set()
        for _ in range(120):
            live.steps(1)
            for table in live.runtime.tables:
                blocks = table.block_ids()[table.readonly].tolist()
                readonly |= {(table.request_id, block) for block in blocks}
        assert live.runtime.counters.reclamation.relocations <= num_evictions(live) + len(readonly)


@pytest.mark.parametrize("recycle", [True, False])
@pytest.mark.parametrize("planner", ["plug", "pack"])
def test_reclaimed_blocks_are_those_that_stay_free(planner: str, recycle: bool) -> None:
    """Blocks that the same step allocates because of a relocation do not count; see its event."""
    with running(planner, 112, 15, 3, recycle=recycle) as live:
        runtime, store = live.runtime, live.store
        took_a_block: dict[str, bool] = {}
        freed: Counter[str] = Counter()
        allocated: Counter[str] = Counter()
        honest, extend = runtime.relocator._apply, store.extend

        def apply(plan: Any, *args: Any) -> list[int]:
            table = runtime.tables[plan.request_id]
            readonly = table.block_ids()[table.readonly].tolist()
            took_a_block[plan.request_id] = next_takes_block(
                runtime.tables, plan.request_id, readonly, recycle
            )
            held = len(table.blocks)
            dropped = honest(plan, *args)
            freed[plan.request_id] = held - len(table.blocks)
            return dropped

        def extended(request_id: str, num_blocks: int) -> list[int]:
            allocated[request_id] += num_blocks
            return extend(request_id, num_blocks)

        runtime.relocator._apply = apply  # type: ignore[method-assign]
        store.extend = extended  # type: ignore[method-assign]
        stays = retaken = 0
        for _ in range(100):
            for seen in (took_a_block, freed, allocated):
                seen.clear()
            live.steps(1)
            for name, num_blocks in freed.items():
                again = allocated[name] and not took_a_block[name]
                assert num_blocks > again
                stays += num_blocks - again
                retaken += again
        counters = runtime.counters
        assert counters.reclamation.relocation_freed_blocks == stays > 0
        events = [e.data for e in runtime.events.page(0, 100_000).events if e.kind == "relocation"]
        assert sum(data["retaken_blocks"] for data in events) == retaken > 0
        assert sum(data["freed_blocks"] for data in events) == stays + retaken
