"""The worth of an automatic round now, or after an eviction, at the measured prices.

Collects the columns of the runtime's tables for the estimate of `vtoken.core.planning.worth`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Bools, Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.sharing import keeps_dead_shared_blocks
from vtoken.core.planning.worth import MAX_STEPS, Estimate, RequestColumns, Worth, estimate_round
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime.due import phases
from vtoken.core.runtime.kernels import NEVER
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.state import RuntimeState
from vtoken.core.tables.token_table import TokenTable

NOTHING = Estimate(0.0, 0, 0, 0)


class _Facts(NamedTuple):
    """The requests that a round considers, one number each; `limit` = budget + interval."""

    num_live: Ints
    extent: Ints
    num_blocks: Ints
    num_full: Ints
    limit: Ints
    budget: Ints
    in_prompt: Ints | Bools


class RoundPricer:
    """Prices the rounds of one runtime."""

    def __init__(self, state: RuntimeState, prices: Prices) -> None:
        self._state = state
        self._prices = prices

    def worth(self, config: VTokenConfig) -> Worth | None:
        """The worth of a round under `config` now; None where holes have no price."""
        if not self._prices.hole_us:
            return None
        return self._prices.worth(self.estimate(config))

    def worth_after(self, config: VTokenConfig, victims: Mapping[str, Ints]) -> Worth | None:
        """The worth of a round once the tokens `victims`, by request, are dead."""
        if not self._prices.hole_us:
            return None
        after = [
            self._after(table, config, victims.get(table.request_id, NO_IDS))
            for table in self._state.tables
            if table.virtual or table.request_id in victims
        ]
        table = np.array(after, dtype=np.int64).reshape(-1, len(_Facts._fields))
        return self._prices.worth(self._estimate(_Facts(*np.ascontiguousarray(table.T)), config))

    def estimate(self, config: VTokenConfig) -> Estimate:
        """The estimate of a round now, without requests that have a relocation in flight (I4)."""
        state = self._state
        tables, due = state.tables, state.due
        columns, rows = tables.columns, tables.all_rows
        live, blocks = columns.num_live[rows], columns.num_blocks[rows]
        rows = rows[(columns.extent[rows] > live) & (blocks > state.needed_blocks(live))]
        rows = rows[due.in_flight[rows] == 0]
        if len(rows) == 0:
            return NOTHING
        facts = _Facts(
            columns.num_live[rows],
            columns.extent[rows],
            columns.num_blocks[rows],
            columns.num_full[rows],
            due.limit[rows],
            due.target[rows],
            state.left_of_prompts(rows) > 0,
        )
        return self._estimate(facts, config)

    def _estimate(self, facts: _Facts, config: VTokenConfig) -> Estimate:
        """Assumes that a prompt's next chunk evicts from all of the request's blocks."""
        evicts = facts.limit < NEVER
        due_in = np.where(evicts, np.maximum(1, facts.limit + 1 - facts.num_live), MAX_STEPS)
        dying = np.where(evicts, facts.limit - facts.budget + 1, 0)
        in_prompt = facts.in_prompt != 0
        columns = RequestColumns(
            facts.num_live,
            facts.extent,
            facts.num_blocks,
            facts.num_full,
            np.where(in_prompt, 1, due_in),
            np.where(in_prompt, facts.num_blocks, dying),
        )
        return estimate_round(
            columns,
            self._state.geometry.block_size,
            recycles=config.recycles,
            fills_holes=config.experiment.planner == "plug",
        )

    def _after(
        self, table: TokenTable, config: VTokenConfig, dead: Ints
    ) -> tuple[int, int, int, int, int, int, bool]:
        """The `_Facts` of one request once its tokens `dead` are dead.

        All-dead blocks are dropped by then, except retained shared ones.
        """
        grid = table.grid()
        live = (grid >= 0) & ~np.isin(grid, dead)
        per_block = np.count_nonzero(live, axis=1)
        stays = per_block > 0
        if keeps_dead_shared_blocks(config):
            stays |= [self._state.store.is_shared(block) for block in table.blocks]
        places = np.flatnonzero(live[stays])
        rules = self._state.rules(table.request_id, config)
        return (
            len(places),
            int(places[-1]) + 1 if len(places) else 0,
            int(np.count_nonzero(stays)),
            int(np.count_nonzero(per_block == table.block_size)),
            phases(rules)[0],
            rules.budget_tokens,
            table.num_tokens < self._state.requests[table.request_id].prefill_end,
        )
