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

Damage = Callable[[TokenTables, str], Any]


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


def add(name: str, number: int) -> Damage:
    """A fact of the row is off by `number`."""

    def damage(tables: TokenTables, request_id: str) -> None:
        fact(tables, request_id)[name] += number

    return damage


def place(token: int, *, of: int) -> Damage:
    """A token is mapped to the place of another one."""

    def damage(tables: TokenTables, request_id: str) -> None:
        index = index_of(tables, request_id)
        index[token] = index[of]

    return damage


def spoil(array: str, place: int, number: int, *, first: str) -> Damage:
    """A number of the row's piece of `array`, which begins at its fact `first`, is off."""

    def damage(tables: TokenTables, request_id: str) -> None:
        start = fact(tables, request_id)[first] * (4 if array == "token_at" else 1)
        getattr(tables.columns.arrays, array)[start + place] += number

    return damage


def swap_places(tables: TokenTables, request_id: str) -> None:
    index = index_of(tables, request_id)
    index[[4, 7]] = index[[7, 4]]


def spoil_what_naive_eviction_holds(tables: TokenTables, request_id: str) -> None:
    tables.columns.arrays.naive_live[fact(tables, request_id)["first_token"] // 4] -= 1


DAMAGE: dict[str, Damage] = {
    "live tokens": add("num_live", 1),
    "a longer extent": add("extent", 1),
    "a shorter extent": add("extent", -1),
    "full blocks": add("num_full", 1),
    "dead slots": add("num_dead_slots", -1),
    "E > S * len(blocks)": add("num_blocks", -1),
    "the last blocks would be another row's": lambda tables, name: fact(tables, name).__setitem__(
        "block_capacity", 2
    ),
    "a front behind the hole at place 6, which would never be used": add("front", 2),
    "two tokens swap places without a move": swap_places,
    "a live token at the place of another": place(4, of=7),
    "a dead token at the place of a live one": place(6, of=7),
    "a live token without a place": lambda tables, name: index_of(tables, name).put(4, -1),
    "a dead token has a place": lambda tables, name: index_of(tables, name).put(8, 8),
    "a hole has a token": spoil("token_at", 6, 7, first="first_block"),
    "live tokens of a block": spoil("block_live", 1, 1, first="first_block"),
    "what naive eviction would hold": spoil_what_naive_eviction_holds,
}


OF_IDENTITY = ("live tokens", "a longer extent", "E > S * len(blocks)")


@pytest.mark.parametrize(
    ("name", "what"), [*(("v", what) for what in DAMAGE), *(("i", what) for what in OF_IDENTITY)]
)
def test_the_check_of_a_table_notices(name: str, what: str) -> None:
    """Also of one that still has the identity layout."""
    tables = healthy()
    tables[name].check()
    DAMAGE[what](tables, name)
    with pytest.raises(InvariantViolation, match=name):
        tables[name].check()


POOL_DAMAGE: dict[str, Callable[[PoolLiveness], Any]] = {
    "equation 1": lambda pool: pool.live.put(1, pool.live[1] - 1),
    "equation 2": lambda pool: pool.holders.put(2, 0),
    "equation 3, used": lambda pool: pool.counts.put(0, pool.counts[0] + 1),
    "equation 3, live; F (4) follows from both": lambda pool: pool.counts.put(
        1, pool.counts[1] - 1
    ),
    "equation 3, shared": lambda pool: pool.counts.put(2, pool.counts[2] + 1),
    "equation 5": lambda pool: pool.owner.put(7, 1),
}


@pytest.mark.parametrize("what", POOL_DAMAGE)
def test_the_check_of_the_pool_notices(what: str) -> None:
    pool = healthy().pool
    pool.check()
    POOL_DAMAGE[what](pool)
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
