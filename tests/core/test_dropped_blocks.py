"""Blocks that leave a table: what moves in the arrays, and how much room the row takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core.tables import evict_tokens, index_of, sync_new_tokens
from vtoken.core.tables.token_tables import TokenTables

S = 4


@given(st.sets(st.integers(0, 19), min_size=1, max_size=19))
def test_the_longest_run_of_kept_blocks_stays_in_place(left: set[int]) -> None:
    tables = TokenTables(20, S)
    sync_new_tokens(tables, "a", range(20), 20 * S)
    table = tables["a"]
    dead = np.isin(np.arange(20), list(left))
    evict_tokens(tables, "a", np.flatnonzero(np.repeat(dead, S)))
    live, before = table.live_ids(), index_of(tables, "a").copy()
    slots = table.slots_of(live)
    assert tables.drop_blocks(table, dead) == sorted(left)
    runs = "".join(" " if i in left else "x" for i in range(20)).split()
    moved = np.count_nonzero(index_of(tables, "a")[live] != before[live])
    assert moved <= S * (20 - len(left) - max(map(len, runs)))
    assert table.slots_of(live).tolist() == slots.tolist()
    assert table.blocks == [i for i in range(20) if i not in left]
    tables.check()


@pytest.mark.parametrize("num_sinks", [0, 1, 2 * S])
def test_a_window_that_moves_on_takes_bounded_room(num_sinks: int) -> None:
    """The newest tokens stay, with the first ones; every block behind those is dropped in turn."""
    window, tables = 10 * S, TokenTables(40, S)
    free, held, slots = list(range(40)), list[int](), dict[int, int]()
    gaps, num_closed = [0], 0
    for t in range(100 * S):
        if tables.choose_places(recycling=False).start in ([], [len(held) * S]):
            held.append(free.pop(0))
        slots[t] = sync_new_tokens(tables, "a", held, t + 1).tolist()[0]
        table = tables["a"]
        if t - window >= num_sinks:
            evict_tokens(tables, "a", [t - window])
            del slots[t - window]
            dropped = tables.drop_blocks(table, table.block_live() == 0)
            held = [block for block in held if block not in dropped]
            free += dropped
        live = table.live_ids()
        assert dict(zip(live.tolist(), table.slots_of(live).tolist(), strict=True)) == slots
        assert table.blocks == held
        tables.check()
        gaps.append(int(tables.columns.gap[table.row]))
        num_closed += gaps[-1] < gaps[-2]
    assert num_closed >= 2
    most_held = (window + num_sinks) // S + 2
    assert tables.columns.block_capacity[table.row] <= 2 * most_held
