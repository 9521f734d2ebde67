"""What an automatic round would be worth now, or after an eviction, at the measured prices.

Reads the runtime's tables into columns; the estimate over them is `vtoken.planning.worth`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from vtoken.arrays import Ints
from vtoken.config.values import VTokenConfig
from vtoken.planning.sharing import keeps_dead_shared_blocks
from vtoken.planning.worth import MAX_STEPS, Estimate, RequestColumns, Worth, estimate_round
from vtoken.protocol.step import NO_IDS
from vtoken.runtime.due import NEVER
from vtoken.runtime.prices import Prices
from vtoken.runtime.relocation.round_planner import recycles
from vtoken.runtime.state import RuntimeState
from vtoken.tables.token_table import TokenTable

NOTHING = Estimate(0.0, 0, 0, 0)
Row = tuple[int, int, int, int, int, int]


class RoundPricer:
    """Prices the rounds of one runtime."""

    def __init__(self, state: RuntimeState, prices: Prices) -> None:
        self._state = state
        self._prices = prices

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
        return self._prices.worth(self._estimate(_columns(rows), config))

    def estimate(self, config: VTokenConfig) -> Estimate:
        """Of a round now. Requests with a relocation in flight are left out (I4)."""
        state, size = self._state, self._state.geometry.block_size
        tables, due = state.tables, state.due
        columns, rows = tables.columns, tables.all_rows
        live, blocks = columns.num_live[rows], columns.num_blocks[rows]
        rows = rows[(columns.extent[rows] > live) & (blocks > live // size + 1)]
        requests, names = state.requests, tables.names
        waits = [requests[names[row]].in_flight_step > 0 for row in rows.tolist()]
        rows = rows[~np.array(waits, dtype=np.bool_)]
        if len(rows) == 0:
            return NOTHING
        live, blocks, limit = columns.num_live[rows], columns.num_blocks[rows], due.limit[rows]
        evicts, dying = limit < NEVER, limit - due.budget[rows] + 1
        due_in = np.where(evicts, np.maximum(1, limit + 1 - live), MAX_STEPS)
        in_prompt = columns.num_tokens[rows] < due.prefill_end[rows]
        asked = RequestColumns(
            live,
            columns.extent[rows],
            blocks,
            columns.num_full[rows],
            np.where(in_prompt, 1, due_in),
            np.where(in_prompt, blocks, np.where(evicts, dying, 0)),
        )
        return self._estimate(asked, config)

    def _estimate(self, columns: RequestColumns, config: VTokenConfig) -> Estimate:
        return estimate_round(
            columns,
            self._state.geometry.block_size,
            recycles=recycles(config),
            fills_holes=config.planner == "plug",
        )

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
