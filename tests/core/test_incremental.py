"""What a table keeps up to date by small steps equals what is counted anew."""

from __future__ import annotations

import numpy as np

from vtoken.tables.token_tables import TokenTables


def test_an_appended_token_is_counted_at_once_and_entered_when_something_asks() -> None:
    tables = TokenTables(8, 4)
    tables.sync_new_tokens("r", [1, 2, 3], 9)
    tables.evict_tokens("r", np.array([2]))
    tables.sync_new_tokens("r", [1, 2, 3], 10)
    table = tables["r"]
    assert (table._num_entered, table.num_tokens, table.num_live, table.extent) == (9, 10, 9, 10)
    assert tables.pool.num_live == 9
    assert table.slots_of(np.array([9])).tolist() == [3 * 4 + 1]
    assert table._num_entered == 10
    tables.check()


def test_loose_tokens_that_follow_single_changes_equal_those_counted_anew() -> None:
    rng = np.random.default_rng(3)
    tables = TokenTables(40, 4)
    blocks = list(range(1, 33))
    tables.sync_new_tokens("r", blocks, 60)
    tables.evict_tokens("r", np.sort(rng.choice(60, 25, replace=False)))
    table = tables["r"]
    table.full_and_loose()
    num_followed = 0
    for _ in range(200):
        if rng.random() < 0.5:
            tables.evict_token("r", int(rng.choice(table.live_ids())))
        hole = table.first_hole(()) if rng.random() < 0.5 else None
        if table.extent < len(blocks) * 4 or hole is not None:
            tables.sync_new_tokens("r", blocks, table.num_tokens + 1, hole)
        table._enter()
        followed = table._loose
        full, loose = table.full_and_loose()
        num_followed += followed is table._loose
        followed, table._loose = table._loose, None
        full_anew, loose_anew = table.full_and_loose()
        assert full.tolist() == full_anew.tolist()
        assert sorted(loose.tolist()) == sorted(loose_anew.tolist())
        table._loose = followed
    assert num_followed > 50
    tables.check()


def test_loose_tokens_handed_out_are_not_written_again() -> None:
    """The worker may still read a step's plan while the next step is planned."""
    tables = TokenTables(8, 4)
    tables.sync_new_tokens("r", [1, 2, 3], 10)
    tables.evict_tokens("r", np.array([1, 5]))
    table = tables["r"]
    _, before = table.full_and_loose()
    kept = before.tolist()
    tables.evict_token("r", 6)
    tables.sync_new_tokens("r", [1, 2, 3], 11)
    tables.sync_new_tokens("r", [1, 2, 3], 12, 1)
    table.full_and_loose()
    assert before.tolist() == kept


def test_the_first_hole_is_found_behind_places_that_filled_up() -> None:
    tables = TokenTables(8, 4)
    tables.sync_new_tokens("r", [1, 2, 3], 12)
    tables.evict_tokens("r", np.array([3, 6, 9]))
    table = tables["r"]
    for place in (3, 6, 9):
        assert table.first_hole(()) == place
        tables.sync_new_tokens("r", [1, 2, 3], table.num_tokens + 1, place)
    assert table.first_hole(()) is None
    tables.evict_token("r", 4)
    assert table.first_hole(()) == 4
    assert table.first_hole({2}) is None
    tables.check()
