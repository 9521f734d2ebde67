"""Numbers of requests and owners of blocks: newest holders, successors, requests without one."""

from __future__ import annotations

import pytest

from tests.support.core.harness import CoreEngine
from tests.support.core.tables import evict_tokens, sync_new_tokens
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.tables import token_tables as tables_module
from vtoken.core.tables.token_tables import TokenTables


def shared() -> TokenTables:
    """Blocks 1 to 10 are a prefix that `a`, `b` and `c` hold; each has one block more."""
    tables = TokenTables(20, 4)
    for i, name in enumerate("abc"):
        sync_new_tokens(tables, name, [*range(1, 11), 11 + i], 41)
    return tables


def owners(tables: TokenTables) -> list[int]:
    tables.check()
    return tables.owners().tolist()


def test_shared_blocks_belong_to_the_newest_holder() -> None:
    assert owners(shared()) == [0, *[3] * 10, 1, 2, 3, *[0] * 6]


def test_blocks_of_a_newest_holder_that_leaves_belong_to_the_one_before() -> None:
    tables = shared()
    tables.release("c")
    assert owners(tables) == [0, *[2] * 10, 1, 2, *[0] * 7]


def test_a_holder_that_is_not_the_newest_leaves_unnoticed() -> None:
    tables = shared()
    tables.release("a")
    assert owners(tables) == [0, *[3] * 10, 0, 2, 3, *[0] * 6]


def test_several_that_leave_between_two_looks_are_followed() -> None:
    tables = shared()
    tables.release("c")
    tables.release("b")
    tables.check()
    sync_new_tokens(tables, "d", [1, 2, 14], 9)  # takes the smallest number that is free
    assert tables["d"].number == 2
    assert owners(tables) == [0, 2, 2, *[1] * 8, 1, 0, 0, 2, *[0] * 5]


def test_a_single_shared_block_that_its_newest_holder_drops_is_inherited() -> None:
    tables = TokenTables(8, 2)
    sync_new_tokens(tables, "a", [1, 2], 4)
    sync_new_tokens(tables, "b", [1, 3], 4)
    evict_tokens(tables, "b", [0])
    evict_tokens(tables, "b", [1])
    assert tables.apply_moves("b", NO_IDS, NO_IDS, [3]) == [1]
    assert owners(tables) == [0, 1, 1, 2, 0, 0, 0, 0]


def test_requests_beyond_the_numbers_are_unnamed_and_own_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables_module, "MAX_NUMBER", 2)
    tables = shared()
    assert [table.number for table in tables] == [1, 2, 0]
    assert owners(tables) == [0, *[0] * 10, 1, 2, 0, *[0] * 6]
    tables.release("c")
    assert owners(tables) == [0, *[2] * 10, 1, 2, *[0] * 7]
    tables.release("a")
    sync_new_tokens(tables, "d", [15], 1)
    assert tables["d"].number == 1


def test_owners_follow_relocation_recycling_and_preemption() -> None:
    engine = CoreEngine(
        num_blocks=48,
        block_size=4,
        config={
            "policy": {"name": "random", "params": {"recent": 2, "sinks": 1}},
            "budget_tokens": 16,
            "evict_when": "always",
            "interval_tokens": 3,
            "theta_f": 0.0,
            "low_watermark_blocks": 48,
            "prefix_sharing": "copy",
            "headroom_blocks": 12,
        },
    )
    for i in range(4):
        engine.add(f"r{i}", 40, prefix="p", prefix_tokens=32, seed=i, max_tokens=30 + 7 * i)
    for step in range(70):
        engine.step()
        if step == 20:
            engine.preempt_newest()
        if step % 9 == 0:
            tables = engine.runtime.tables
            newest = {b: t.number for t in tables for b in t.blocks}
            found = tables.owners()
            assert {b: int(found[b]) for b in found.nonzero()[0].tolist()} == newest
    assert engine.runtime.counters.reclamation.relocations > 0
    assert engine.runtime.counters.requests.preempted > 0
