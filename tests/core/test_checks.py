"""`check()` detects every broken equation of pool, table and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine
from tests.support.core.tables import evict_tokens, hole_of, index_of, sync_new_tokens
from vtoken.base.errors import InvariantViolation
from vtoken.core.runtime.growth import Scheduled
from vtoken.core.tables.pool import PoolLiveness
from vtoken.core.tables.token_tables import TokenTables


def healthy() -> TokenTables:
    """`v` has holes and a recycled token, `i` still has the identity layout; one block shared."""
    tables = TokenTables(10, 4)
    sync_new_tokens(tables, "i", [1, 2], 6)
    sync_new_tokens(tables, "v", [1, 3, 4], 11)
    evict_tokens(tables, "v", np.array([5, 6, 8]))
    tables.choose_places(recycling=True)
    assert hole_of(tables, "v") == 5
    sync_new_tokens(tables, "v", [1, 3, 4], 12)
    tables.check()
    return tables


def fact(tables: TokenTables, request_id: str) -> Any:
    return tables.columns.facts[tables[request_id].row]


def swap_places(tables: TokenTables, request_id: str) -> None:
    """Two tokens swap places without a move."""
    index = index_of(tables, request_id)
    index[[4, 7]] = index[[7, 4]]


def double_place(tables: TokenTables, request_id: str) -> None:
    """A live token mapped to another one's place."""
    index = index_of(tables, request_id)
    index[4] = index[7]


def lose_place(tables: TokenTables, request_id: str) -> None:
    index_of(tables, request_id)[4] = -1


def occupy_hole(tables: TokenTables, request_id: str) -> None:
    first = fact(tables, request_id)["first_block"] * tables.block_size
    tables.columns.arrays.token_at[first + 6] = 6


def count_live(tables: TokenTables, request_id: str) -> None:
    fact(tables, request_id)["num_live"] += 1


def stretch_extent(tables: TokenTables, request_id: str) -> None:
    fact(tables, request_id)["extent"] += 1


def shrink_extent(tables: TokenTables, request_id: str) -> None:
    fact(tables, request_id)["extent"] -= 1


def drop_block(tables: TokenTables, request_id: str) -> None:
    """E > S * len(blocks)."""
    fact(tables, request_id)["num_blocks"] = 2


def misplace_dead(tables: TokenTables, request_id: str) -> None:
    """A dead token mapped to the place of a live one."""
    index = index_of(tables, request_id)
    index[6] = index[7]


def revive(tables: TokenTables, request_id: str) -> None:
    index_of(tables, request_id)[8] = 8


def miscount_block(tables: TokenTables, request_id: str) -> None:
    first = fact(tables, request_id)["first_block"]
    tables.columns.arrays.block_live[first + 1] += 1


def miscount_full(tables: TokenTables, request_id: str) -> None:
    fact(tables, request_id)["num_full"] += 1


def miscount_ghosts(tables: TokenTables, request_id: str) -> None:
    fact(tables, request_id)["num_dead_slots"] -= 1


def miscount_positional(tables: TokenTables, request_id: str) -> None:
    """What naive eviction would hold."""
    tables.columns.arrays.naive_live[fact(tables, request_id)["first_token"] // 4] -= 1


def overrun_segment(tables: TokenTables, request_id: str) -> None:
    """The row's last blocks would be another row's."""
    fact(tables, request_id)["block_capacity"] = 2


def skip_hole(tables: TokenTables, request_id: str) -> None:
    """A `front` behind the hole at place 6: recycling would never use it."""
    fact(tables, request_id)["front"] = 7


@pytest.mark.parametrize(
    "damage",
    [
        miscount_block,
        miscount_full,
        miscount_ghosts,
        miscount_positional,
        overrun_segment,
        skip_hole,
        swap_places,
        double_place,
        lose_place,
        occupy_hole,
        count_live,
        stretch_extent,
        shrink_extent,
        drop_block,
        misplace_dead,
        revive,
    ],
)
def test_the_check_of_a_virtual_table_notices(damage: Callable[[TokenTables, str], None]) -> None:
    tables = healthy()
    table = tables["v"]
    table.check()
    damage(tables, "v")
    with pytest.raises(InvariantViolation, match="v"):
        table.check()


@pytest.mark.parametrize("damage", [count_live, stretch_extent])
def test_the_check_of_an_identity_table_notices(damage: Callable[[TokenTables, str], None]) -> None:
    tables = healthy()
    table = tables["i"]
    table.check()
    damage(tables, "i")
    with pytest.raises(InvariantViolation, match="i"):
        table.check()


def test_the_check_of_an_identity_table_notices_missing_blocks() -> None:
    tables = healthy()
    fact(tables, "i")["num_blocks"] = 1
    with pytest.raises(InvariantViolation):
        tables["i"].check()


def miscount_live(pool: PoolLiveness) -> None:
    """Equation 1."""
    pool.live[1] -= 1


def orphan_readers(pool: PoolLiveness) -> None:
    """Equation 2."""
    pool.holders[2] = 0


def miscount_used(pool: PoolLiveness) -> None:
    """Equation 3, first."""
    pool.counts[0] += 1


def miscount_total(pool: PoolLiveness) -> None:
    """Equation 3, last; F (4) follows from it and the first."""
    pool.counts[1] -= 1


def miscount_shared(pool: PoolLiveness) -> None:
    """Equation 3, between them."""
    pool.counts[2] += 1


def name_free_block(pool: PoolLiveness) -> None:
    """Equation 5."""
    pool.owner[7] = 1


@pytest.mark.parametrize(
    "damage",
    [
        miscount_live,
        orphan_readers,
        miscount_used,
        miscount_shared,
        miscount_total,
        name_free_block,
    ],
)
def test_the_check_of_the_pool_notices(damage: Callable[[PoolLiveness], None]) -> None:
    pool = healthy().pool
    pool.check()
    damage(pool)
    with pytest.raises(InvariantViolation, match="I2"):
        pool.check()


def test_f_follows_the_counts() -> None:
    pool = healthy().pool
    assert pool.fragmentation == pytest.approx(1 - (4 + 2 + 3 + 2) / 16)
    assert PoolLiveness(4, 4).fragmentation == 0.0


def test_the_check_of_the_tables_notices_a_reader_without_a_token() -> None:
    tables = healthy()
    tables.pool.readers[1 * 4] += 1  # the pool alone stays consistent
    tables.pool.check()
    with pytest.raises(InvariantViolation, match="slot 4 has 3 readers"):
        tables.check()


def test_the_check_of_the_tables_notices_two_requests_on_one_private_slot() -> None:
    tables = healthy()
    tables.columns.arrays.block_id[fact(tables, "i")["first_block"] + 1] = 3
    with pytest.raises(InvariantViolation):
        tables.check()


def test_the_check_of_the_tables_notices_an_owner_that_is_not_the_newest_holder() -> None:
    tables = healthy()
    tables.pool.owner[1] = tables["i"].number  # it holds the block too, but `v` came later
    tables.pool.check()
    with pytest.raises(InvariantViolation, match=r"owner\[1\] = 1, but the tables give 2"):
        tables.check()


def test_the_check_of_the_tables_notices_two_requests_of_one_number() -> None:
    tables = healthy()
    fact(tables, "v")["number"] = tables["i"].number
    with pytest.raises(InvariantViolation, match="same number"):
        tables.check()


def test_the_check_of_the_runtime_notices_a_table_without_a_state() -> None:
    engine = CoreEngine(num_blocks=8)
    engine.add("a", 5)
    engine.step()
    engine.runtime.check()
    del engine.runtime.requests.held["a"]
    with pytest.raises(InvariantViolation, match="I4"):
        engine.runtime.check()


# ---------------------------------------------------------------- what mutators refuse


def test_a_refused_relocation_changes_nothing() -> None:
    tables = healthy()
    table = tables["v"]
    before = (list(table.blocks), table.grid().tolist(), tables.pool.live.tolist())
    for ids, slots, blocks in (
        ([9], [4], [1, 3, 4]),  # a live token is there
        ([9, 10], [13, 13], [1, 3, 4]),  # doubled
        ([9], [20], [1, 3, 4]),  # outside
        ([5], [14], [1, 3, 4]),  # dead
        ([99], [14], [1, 3, 4]),  # unknown
        ([9], [14], [1, 3]),  # block 4 still holds token 10
        ([9], [14], [1, 3, 3]),  # doubled block
        ([9], [14], [1, 3, 4, 10]),  # no block of the pool
        ([9], [14], [1, 3, 4, -1]),
        ([9], [-3], [1, 3, 4]),
    ):
        with pytest.raises(InvariantViolation):
            tables.apply_moves("v", np.array(ids), np.array(slots), blocks)
        tables.check()
    assert (list(table.blocks), table.grid().tolist(), tables.pool.live.tolist()) == before


def test_a_block_table_that_shrank_is_refused() -> None:
    engine = CoreEngine(num_blocks=8)
    engine.add("a", 6)
    engine.step()
    with pytest.raises(InvariantViolation, match="I4: a holds 0 blocks, its table has"):
        engine.runtime.appender.append(Scheduled(["a"], [7], [0]))


def test_tokens_that_do_not_fit_are_refused() -> None:
    tables = healthy()
    with pytest.raises(InvariantViolation, match="do not fit"):
        sync_new_tokens(tables, "i", [1, 2], 9)


# ---------------------------------------------------------------- strict and lenient


def test_strict_mode_stops_and_lenient_mode_counts_and_tells() -> None:
    for strict in (True, False):
        engine = CoreEngine(num_blocks=8, strict=strict)
        violation = InvariantViolation("I1", "contents differ")
        if strict:
            with pytest.raises(InvariantViolation):
                engine.runtime.current.violated(violation)
        else:
            engine.runtime.current.violated(violation)
        event = engine.runtime.events.page(0, 10).events[0]
        assert event.kind == "violation"
        assert event.data == {"invariant": "I1", "detail": "contents differ"}
        assert engine.runtime.counters.invariants.violations == 1


@pytest.mark.parametrize("block", [-1, 10])
def test_a_block_that_the_pool_does_not_have_is_refused(block: int) -> None:
    tables = healthy()
    with pytest.raises(InvariantViolation, match="no block"):
        sync_new_tokens(tables, "i", [1, 2, block], 9)
    tables.check()
