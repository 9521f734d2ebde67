"""What requests can give under a configuration, who would give now, and how many more would fit.

Reads the runtime and changes nothing. For the configuration in force, the numbers are those by
which the runtime decides, if the engine schedules every running request in the next step. A waiting
request that a change makes fit is given for as soon as the engine has tried it again.
"""

from __future__ import annotations

import time
from functools import cached_property

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.giving import Givers, share_out
from vtoken.core.runtime.admission import Demand
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.runtime.shortage import NO_SHORTAGE, Shortage
from vtoken.core.tables.token_table import TokenTable
from vtoken.sentences import counted


class Outlook:
    """The pressure of one moment under `config`."""

    def __init__(self, runtime: Runtime, config: VTokenConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._size = runtime.geometry.block_size

    @cached_property
    def givable_blocks(self) -> int:
        """What running requests can give, now or once their prompts are computed."""
        tables = [table for table in self._tables if self._gives(table)]
        return int(self._givers(tables).most_blocks(self._size).sum()) if tables else 0

    @cached_property
    def shortage(self) -> Shortage:
        """The shortage of the next step, after a round that needs no victims."""
        runtime, config = self._runtime, self._config
        if self.givable_blocks == 0:
            return NO_SHORTAGE
        now, soon = runtime.shortages.growth()
        free = runtime.state.store.num_free_blocks()
        found = Shortage(now, soon, self._asked_blocks(), config.headroom_blocks, free)
        if found.blocks == 0 or config.reclamation != "auto":
            return found
        preview = runtime.round_planner.preview_after(config, {})
        free += preview.emptied_blocks + preview.round.num_freed_blocks
        return Shortage(now, soon, found.asked_blocks, config.headroom_blocks, free)

    def keeping(self) -> dict[str, int]:
        """The requests that would give for the shortage, and the live tokens that each keeps."""
        blocks = self._runtime.shortages.to_give(self.shortage, self._config)
        may_give = self._runtime.evictor.may_give
        able = [table for table in self._tables if may_give(table, self._rules(table))]
        if blocks == 0 or not able:
            return {}
        givers = self._givers(able)
        kept = share_out(givers, blocks, block_size=self._size)
        pairs = zip(able, kept.tolist(), strict=True)
        return {table.request_id: keeps for table, keeps in pairs if keeps < table.num_live}

    def more_requests(self) -> int | None:
        """How many more requests of the running ones' mean size fit before one ends; None if no
        running request evicts.

        Under `always` a running request counts by its budget and interval, to which it grows again.
        """
        runtime, config = self._runtime, self._config
        admission = runtime.admission
        peaks = [admission.peaks_of_another(table.request_id, config) for table in self._tables]
        counted = np.array([peak for peak in peaks if peak is not None])
        if len(counted) == 0:
            return None
        first, later = np.maximum(1, counted.mean(axis=0)).tolist()
        spare = runtime.state.store.num_free_blocks() + self.givable_blocks
        due = [table for table in self._tables if runtime.evictor.is_due(table, config)]
        if due:
            givers = self._givers(due)
            limits = givers._replace(floor=givers.floor + self._intervals(due))
            spare += int(limits.most_blocks(self._size).sum())
        spare -= admission.future_blocks(None, config)
        return 0 if spare < first else 1 + int((spare - first) / later)

    def patience_note(self) -> str | None:
        """When others give for the first waiting request; None if nobody waits or can give."""
        admission = self._runtime.admission
        demand = admission.demand
        if demand is None or self.givable_blocks == 0:
            return None
        now = time.monotonic()
        left = admission.patience_left_s(demand, now, self._config)
        before = admission.patience_left_s(demand, now, self._runtime.config)
        when = f"in {left:.1f} s" if left > 0 else "from the next step on"
        instead = f"in {before:.1f} s" if before > 0 else "now"
        waits = f"{demand.request_id} waits for {counted(demand.needed_blocks, 'block')}"
        return f"{waits}: others would give for it {when}, not {instead}"

    @property
    def _tables(self) -> list[TokenTable]:
        return list(self._runtime.tables)

    def _gives(self, table: TokenTable) -> bool:
        """Whether the request may give tokens, now or later in its life."""
        rules = self._rules(table)
        if not rules.gives:
            return False
        end = self._runtime.state.requests[table.request_id].prefill_end
        return rules.evict_during != "prefill" or table.num_tokens <= end

    def _givers(self, tables: list[TokenTable]) -> Givers:
        rows: Ints = np.array([table.row for table in tables], dtype=np.int64)
        budgets = [self._rules(table).budget_tokens for table in tables]
        return self._runtime.admission.givers(rows)._replace(
            floor=np.array(budgets, dtype=np.int64),
            step_blocks=np.maximum(1, -(-self._intervals(tables) // self._size)),
        )

    def _intervals(self, tables: list[TokenTable]) -> Ints:
        intervals = [self._rules(table).interval_tokens for table in tables]
        return np.array(intervals, dtype=np.int64)

    def _rules(self, table: TokenTable) -> VTokenConfig:
        return self._runtime.state.rules(table.request_id, self._config)

    def _asked_blocks(self) -> int:
        """As `Admission.asked_blocks`. Whether enough can be given is what the engine found when it
        last tried, unless the configuration makes a difference to that.
        """
        runtime, config = self._runtime, self._config
        demand = runtime.admission.demand
        if demand is None:
            return 0
        if runtime.admission.patience_left_s(demand, time.monotonic(), config) > 0:
            return 0
        fits = self.fits(demand)
        if fits == Outlook(runtime, runtime.config).fits(demand):
            fits = demand.satisfiable
        return demand.needed_blocks if fits else 0

    def fits(self, demand: Demand) -> bool:
        admission = self._runtime.admission
        needed = demand.needed_blocks + admission.future_blocks(demand.request_id, self._config)
        return needed <= self._runtime.state.store.num_free_blocks() + self.givable_blocks
