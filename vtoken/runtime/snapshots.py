"""What the planner sees of one ledger: layouts of its tables, made when taken, and the headroom.

Reads the ledger, changes nothing. Who has a relocation in flight is not planned for (I4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vtoken.config.values import VTokenConfig
from vtoken.planning.planner import Layout, num_excess_blocks
from vtoken.runtime.state import Ledger
from vtoken.tables.token_table import Ids, TokenTable


class Snapshots:
    """Snapshots of the tables of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def layouts(self, request_ids: Iterable[str] | None = None) -> Iterator[Layout]:
        """Snapshots, made when taken, of the virtual requests that hold more blocks than they need.

        The most empty slots first; requests with a relocation in flight are left out (I4).
        """
        size = self._ledger.geometry.block_size
        tables = self.movable(request_ids)
        tables.sort(key=lambda table: table.num_live - len(table.blocks) * size)
        return map(self.layout_of, tables)

    def movable(self, request_ids: Iterable[str] | None = None) -> list[TokenTable]:
        """Tables that a round looks at; without any it frees nothing."""
        known, states = self._ledger.tables, self._ledger.states
        asked = known if request_ids is None else map(known.__getitem__, request_ids)
        return [
            table
            for table in asked
            if has_excess(table) and not states[table.request_id].in_flight_step
        ]

    def layout_of(self, table: TokenTable, dead: Ids | None = None) -> Layout:
        """The planner's snapshot of one table; `dead`: ids to be counted as dead already."""
        grid = table.grid()
        if dead is not None and len(dead):
            grid[np.isin(grid, dead)] = -1
        store = self._ledger.store
        # Blocks outside `readonly` are private and unhashed, see RequestState.
        readonly = self._ledger.states[table.request_id].readonly
        asked = [
            (i, block)
            for i, block in enumerate(table.blocks if readonly or not table.virtual else ())
            if not table.virtual or block in readonly
        ]
        movable = np.ones(len(table.blocks), dtype=np.bool_)
        writable = movable.copy()
        for i, block in asked:
            movable[i] = not store.is_shared(block)
            writable[i] = store.is_writable(block)
        return Layout(table.request_id, tuple(table.blocks), grid, movable, writable)

    def headroom(self, config: VTokenConfig) -> int:
        """Fresh blocks that one round may take now."""
        return min(config.headroom_blocks, self._ledger.store.num_free_blocks())

    def waits_for_reports(self) -> bool:
        """Whether a request that holds too much is left out because of a relocation in flight."""
        states = self._ledger.states
        return any(
            states[table.request_id].in_flight_step and has_excess(table)
            for table in self._ledger.tables
        )


def has_excess(table: TokenTable) -> bool:
    """Whether the request has evicted, and holds more blocks than it needs."""
    return table.virtual and (
        num_excess_blocks(len(table.blocks), table.num_live, table.block_size) > 0
    )
