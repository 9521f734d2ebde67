"""What an automatic round would be worth now, or after an eviction, at the measured prices.

Reads the runtime's tables into columns; the estimate over them is `vtoken.planning.worth`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from vtoken.arrays import Ints
from vtoken.config.values import VTokenConfig
from vtoken.planning.planner import num_excess_blocks
from vtoken.planning.sharing import keeps_dead_shared_blocks
from vtoken.planning.worth import MAX_STEPS, Estimate, RequestColumns, Worth, estimate_round
from vtoken.protocol.step import NO_IDS
from vtoken.runtime.prices import Prices
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable

NOTHING = Estimate(0.0, 0, 0, 0)
Row = tuple[int, int, int, int, int, int]


class RoundPricer:
    """Prices the rounds of one runtime."""

    def __init__(self, state: RuntimeState, prices: Prices) -> None:
        self._state = state
        self._prices = prices
        estimate_round(_columns(()), 1, recycles=True, fills_holes=True)  # compiled from here on

    def worth(self, config: VTokenConfig) -> Worth | None:
        """Of a round that `config` would take now; None where holes have no price."""
        if not self._prices.hole_us:
            return None
        return self._prices.worth(self.estimate(config))

    def worth_after(self, config: VTokenConfig, victims: Mapping[str, Ints]) -> Worth | None:
        """Of a round once the tokens `victims`, by request, are dead."""
        if not self._prices.hole_us:
            return None
        rows = [
            self._row_after(table, config, victims.get(table.request_id, NO_IDS))
            for table in self._state.tables
            if table.virtual or table.request_id in victims
        ]
        return self._prices.worth(self._estimate(rows, config))

    def estimate(self, config: VTokenConfig) -> Estimate:
        """Of a round now. Requests with a relocation in flight are left out (I4)."""
        requests, size = self._state.requests, self._state.geometry.block_size
        rows = [
            self._row(table, config)
            for table in self._state.tables
            if table.extent > table.num_live
            and num_excess_blocks(len(table.blocks), table.num_live, size) > 0
            and not requests[table.request_id].in_flight_step
        ]
        return self._estimate(rows, config) if rows else NOTHING

    def _estimate(self, rows: Iterable[Row], config: VTokenConfig) -> Estimate:
        return estimate_round(
            _columns(rows),
            self._state.geometry.block_size,
            recycles=config.recycle and config.reclamation != "off",
            fills_holes=config.planner == "plug",
        )

    def _row(self, table: TokenTable, config: VTokenConfig) -> Row:
        num_full = int(np.count_nonzero(table.block_live() == table.block_size))
        eviction = self._next_eviction(table, config, table.num_live)
        return table.num_live, table.extent, len(table.blocks), num_full, *eviction

    def _row_after(self, table: TokenTable, config: VTokenConfig, dead: Ints) -> Row:
        """All-dead blocks have left then, except shared ones where they are kept."""
        grid = table.grid()
        live = (grid >= 0) & ~np.isin(grid, dead)
        a_block = np.count_nonzero(live, axis=1)
        stays = a_block > 0
        if keeps_dead_shared_blocks(config):
            stays |= [self._state.store.is_shared(block) for block in table.blocks]
        places = np.flatnonzero(live[stays])
        num_full = int(np.count_nonzero(a_block == table.block_size))
        extent = int(places[-1]) + 1 if len(places) else 0
        eviction = self._next_eviction(table, config, len(places))
        return len(places), extent, int(np.count_nonzero(stays)), num_full, *eviction

    def _next_eviction(
        self, table: TokenTable, config: VTokenConfig, num_live: int
    ) -> tuple[int, int]:
        """In how many steps of attention the request evicts again, at least 1, and how much.

        A prompt's next chunk may evict whatever its budget is; all blocks have holes after that.
        """
        rules = self._state.rules(table.request_id, config)
        if table.num_tokens < self._state.requests[table.request_id].prefill_end:
            return 1, len(table.blocks)
        if not rules.evicts:
            return MAX_STEPS, 0
        dying = rules.interval_tokens + 1
        return max(1, rules.budget_tokens + dying - num_live), dying


def _columns(rows: Iterable[Row]) -> RequestColumns:
    table = np.array([*rows], dtype=np.int64).reshape(-1, len(RequestColumns._fields))
    return RequestColumns(*np.ascontiguousarray(table.T))
