"""Who needs blocks under a configuration, what running requests can give for them, who would give
now, and how many more would fit.

Reads the runtime and changes nothing. The status, rows of requests, the diagnosis and dry runs all
read this, so that they agree. For the configuration in force, the numbers are those by which the
runtime decides, if the engine schedules every running request in the next step.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import structs

from vtoken.base.arrays import Ints
from vtoken.base.errors import RefusedError
from vtoken.base.request_ids import short_id
from vtoken.control.waiting import MAX_WAITING_ROWS
from vtoken.core.config.values import VTokenConfig, merge_patch
from vtoken.core.planning.giving import Givers, share_out
from vtoken.core.runtime.admission import Demand
from vtoken.core.runtime.losses import KEPT_SHARES, WINDOW_S
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.runtime.shortage import NO_SHORTAGE, Shortage
from vtoken.core.tables.token_table import TokenTable
from vtoken.sentences import counted
from vtoken.wire import FirstWaiting, MemoryPressure, WaitsFor


class Outlook:
    """The pressure of one moment under `config`."""

    def __init__(self, runtime: Runtime, config: VTokenConfig) -> None:
        self._runtime = runtime
        self.config = config
        self._size = runtime.geometry.block_size

    @cached_property
    def rows(self) -> Ints:
        """The rows of the requests that may give, now or once their prompts are computed."""
        if self.config is self._runtime.effective[0]:
            return self._runtime.requests.giving_rows()
        giving = [table.row for table in self._tables if self._gives(table)]
        return np.array(giving, dtype=np.int64)

    @cached_property
    def givers(self) -> Givers:
        """These requests."""
        runtime = self._runtime
        if self.config is runtime.effective[0]:
            return runtime.demand.givers(self.rows)
        return self._givers([runtime.tables.at(row) for row in self.rows.tolist()])

    @cached_property
    def givable_blocks(self) -> int:
        """What running requests can give until each is at its floor."""
        return int(self.blocks.sum())

    @cached_property
    def blocks(self) -> Ints:
        """The blocks that each of `rows` [k] can give until it is at its floor."""
        return self.givers.most_blocks()

    @cached_property
    def tokens(self) -> Ints:
        """The tokens that would die for these blocks [k]."""
        kept = share_out(self.givers, self.givable_blocks)
        tokens: Ints = self.givers.live - kept
        return tokens

    @cached_property
    def givable_tokens(self) -> int:
        """The tokens that would die for them."""
        return int(self.tokens.sum())

    @cached_property
    def spendable_blocks(self) -> int:
        """What running requests give if it is asked for, and what they hold beyond budgets and
        intervals under `always`; 0 unless reclamation is auto.
        """
        if self.config.reclamation != "auto":
            return 0
        is_due = self._runtime.evictor.is_due
        due = [table for table in self._tables if is_due(table, self.config)]
        if not due:
            return self.givable_blocks
        limits = self._budgets(due) + self._intervals(due)
        excess = self._givers(due)._replace(floor=limits).most_blocks()
        return self.givable_blocks + int(excess.sum())

    @cached_property
    def standing(self) -> Shortage:
        """The shortage of this moment, whether or not anybody gives for it.

        Growth counts where requests evict under pressure: others grow without asking.
        """
        runtime, config = self._runtime, self.config
        admission, demand = runtime.admission, runtime.admission.demand
        now = soon = asked = future = 0
        reserves = demand is not None and demand.reserves
        if config.evicts_under_pressure or len(self.givers.live):
            now, soon = runtime.demand.growth_of_all()
        if demand is not None:
            asked = demand.needed_blocks
            future = admission.reserved_blocks(demand, config, now)
        headroom = config.headroom_blocks if reserves or len(self.givers.live) else 0
        free = runtime.store.num_free_blocks()
        return Shortage(now, soon, asked, headroom, free, future, self.givable_blocks)

    @cached_property
    def oldest_wait_s(self) -> float:
        """How long the request that waits longest has waited; 0 if none waits."""
        return self._runtime.admission.oldest_wait_s(time.monotonic())

    @cached_property
    def waits_for(self) -> WaitsFor:
        """What ends the shortage of this moment; "" if no block is short."""
        found, demand = self.standing, self._runtime.admission.demand
        if found.blocks == 0:
            return ""
        if self.config.reclamation != "auto":
            return "resume"
        enough = found.is_enough_given and found.blocks <= self.givable_blocks
        if enough and demand is not None and self.patience_left_s(demand) > 0:
            return "patience"
        return "giving" if enough else "end"

    @cached_property
    def shortage(self) -> Shortage:
        """What requests give for in the next step, after a round that needs no victims."""
        runtime, config, demand = self._runtime, self.config, self._runtime.admission.demand
        if self.givable_blocks == 0:
            return NO_SHORTAGE
        asked, enough = 0, self.standing.is_enough_given
        if demand is not None and enough and self.patience_left_s(demand) <= 0:
            asked = demand.needed_blocks
        now, soon = runtime.demand.growth_of_all()
        free = runtime.store.num_free_blocks()
        found = Shortage(now, soon, asked, config.headroom_blocks, free)
        if found.blocks == 0 or config.reclamation != "auto":
            return found
        free += self.compacted_blocks
        return Shortage(now, soon, asked, config.headroom_blocks, free)

    def keeping(self) -> dict[str, int]:
        """The requests that would give for the shortage, and the live tokens that each keeps."""
        blocks = self._runtime.shortages.to_give(self.shortage, self.config)
        may_give = self._runtime.evictor.may_give
        able = [table for table in self._tables if may_give(table, self._rules(table))]
        if blocks == 0 or not able:
            return {}
        givers = self._givers(able)
        kept = share_out(givers, blocks)
        pairs = zip(able, kept.tolist(), strict=True)
        return {table.request_id: keeps for table, keeps in pairs if keeps < table.num_live}

    def more_requests(self) -> int | None:
        """How many more requests of the running ones' mean size fit before one ends; None if no
        running request evicts.

        Under `always` a running request counts by its budget and interval, to which it grows again.
        """
        runtime, config = self._runtime, self.config
        admission = runtime.admission
        peaks = [runtime.demand.peaks_of(table.request_id, config) for table in self._tables]
        counted = np.array([peak for peak in peaks if peak is not None])
        if len(counted) == 0:
            return None
        first, later = np.maximum(1, counted.mean(axis=0)).tolist()
        spare = runtime.store.num_free_blocks() + self.spendable_blocks
        spare -= admission.future_blocks(config)
        return 0 if spare < first else 1 + int((spare - first) / later)

    @cached_property
    def waiting(self) -> list[str]:
        """The requests that wait for blocks, in the order in which vLLM starts them."""
        requests, demand = self._runtime.requests, self._runtime.admission.demand
        if demand is None:
            return []

        def order(name: str) -> tuple[bool, int, bool, float]:
            request = requests.announced[name]
            is_new = request.num_preemptions == 0
            return name != demand.request_id, request.priority, is_new, request.waits_since

        announced = requests.announced.items()
        names = [n for n, r in announced if n not in requests.held and not r.is_check]
        return sorted(names, key=order)

    @cached_property
    def spares(self) -> list[int]:
        """The blocks that are free or can be given beyond what the first of `waiting`, the first
        two and so on take until their ends; below 0: so many are missing.

        At least: what running requests give they may take again, as if they could not give it then.
        """
        runtime, config, found = self._runtime, self.config, self.standing
        demand, book = runtime.admission.demand, runtime.demand
        names = runtime.tables.names
        given = {
            names[row]: n for row, n in zip(self.rows.tolist(), self.blocks.tolist(), strict=True)
        }
        again = book.until_peaks(config, given) - book.until_peaks(config)
        spare = found.free_blocks + self.spendable_blocks - found.asked_blocks - found.future_blocks
        spare -= again if self.waiting else 0
        at_once = self.spendable_blocks - found.blocks  # for the first, and running requests
        spares, chunk = [], runtime.shape.max_chunk_tokens
        for name in self.waiting[:MAX_WAITING_ROWS]:
            if demand is not None and name != demand.request_id:
                prompt = runtime.requests.announced[name].num_prompt_tokens
                taken = runtime.shape.blocks_of(prompt) + book.most_of_others(prompt, chunk)
                spare -= book.most_blocks(name, config) or taken
            spares.append(min(spare, at_once))
        return spares

    @property
    def startable_requests(self) -> int:
        """How many of `waiting` could start one after the other before a running request ends; at
        least, since what the started ones can give is not counted.
        """
        return sum(spare >= 0 for spare in self.spares)

    @property
    def missing_blocks(self) -> int:
        """What the pool lacks for running requests and for all of `waiting` to start now."""
        spare = self.spendable_blocks - self.standing.blocks
        return max(0, -min([spare, *self.spares]))

    @property
    def total_blocks(self) -> int:
        """The blocks of the pool."""
        return self._runtime.geometry.num_blocks

    @property
    def compacted_blocks(self) -> int:
        """The blocks that a compaction would free."""
        preview = self._runtime.round_planner.preview_after(self.config, {})
        return preview.emptied_blocks + preview.round.num_freed_blocks

    @property
    def gives(self) -> bool:
        """Whether a request gives, now or if one came."""
        return self.config.evicts_under_pressure or len(self.givers.live) > 0

    @property
    def is_tight(self) -> bool:
        """Whether a block is short, or nearly so."""
        return self._runtime.current.is_short_soon or bool(self.waiting or self.waits_for)

    def under(self, change: dict[str, Any]) -> Outlook | None:
        """The outlook of this moment after a change; None if it would be refused."""
        geometry = self._runtime.geometry
        try:
            config = merge_patch(
                self.config,
                change,
                num_blocks=geometry.num_blocks,
                num_layers=geometry.num_layers,
                num_heads=geometry.num_heads,
            )
        except RefusedError:
            return None
        return Outlook(self._runtime, config)

    def patience_note(self) -> str | None:
        """When others give for the first waiting request; None if nobody waits or can give."""
        admission = self._runtime.admission
        demand = admission.demand
        if demand is None or self.givable_blocks == 0:
            return None
        left = self.patience_left_s(demand)
        before = Outlook(self._runtime, self._runtime.config).patience_left_s(demand)
        when = f"in {left:.1f} s" if left > 0 else "from the next step on"
        instead = f"in {before:.1f} s" if before > 0 else "now"
        waits = f"{short_id(demand.request_id)} waits for {counted(demand.needed_blocks, 'block')}"
        return f"{waits}: others would give for it {when}, not {instead}"

    # ------------------------------------------------------------ documents

    def pressure(self) -> MemoryPressure | None:
        """The document of the configuration in force; None if no request gives, now or if one
        came.
        """
        runtime, short = self._runtime, self.standing
        if not self.gives:
            return None
        log, (tokens, requests) = runtime.finished, runtime.losses.given.recent()
        return MemoryPressure(
            **structs.asdict(runtime.counters.pressure),
            near=runtime.current.is_short_soon and len(self.givers.live) > 0,
            short_blocks=short.blocks,
            growth_blocks=short.growth_blocks,
            asked_blocks=short.asked_blocks,
            givers=int(np.count_nonzero(self.blocks)),
            givable_tokens=self.givable_tokens,
            givable_blocks=self.givable_blocks,
            recent_tokens=tokens,
            recent_givers=requests,
            window_s=WINDOW_S,
            spared_tokens=int(np.maximum(0, self.givers.live - self._floors).sum()),
            kept_shares={
                f"{bound:g}": n for bound, n in zip(KEPT_SHARES, log.kept_shares, strict=True)
            },
            kept_share_sum=log.kept_sum,
            headroom_blocks=short.headroom_blocks,
            future_blocks=short.future_blocks,
            waits_for=self.waits_for,
        )

    def first_waiting(self) -> FirstWaiting | None:
        """What the first waiting request lacks; None if it lacks nothing."""
        demand = self._runtime.admission.demand
        if demand is None or not demand.needed_blocks:
            return None
        request, reread = self._runtime.requests.announced.get(demand.request_id), 0
        swapped = demand.request_id in self._runtime.swapper.requests
        if request is not None and request.num_preemptions and not swapped:
            reread = request.num_prompt_tokens - 1  # all but the newest
        return FirstWaiting(
            id=demand.request_id,
            needed_blocks=demand.needed_blocks,
            withheld_blocks=demand.withheld_blocks,
            short_blocks=self.standing.blocks,
            reread_tokens=reread,
            patience_s=self.patience_left_s(demand),
        )

    def givable_of(self) -> dict[str, int]:
        """The tokens that each of the requests that may give can give."""
        names = (self._runtime.tables.names[row] for row in self.rows.tolist())
        return dict(zip(names, self.tokens.tolist(), strict=True))

    # ------------------------------------------------------------ inside

    @property
    def _floors(self) -> Ints:
        """The budgets of `rows` [k]."""
        runtime = self._runtime
        if self.config is runtime.effective[0]:
            return runtime.requests.due.floor[self.rows]
        return self._budgets([runtime.tables.at(row) for row in self.rows.tolist()])

    @property
    def _tables(self) -> list[TokenTable]:
        return list(self._runtime.tables)

    def _gives(self, table: TokenTable) -> bool:
        """Whether the request may give tokens, now or later in its life."""
        rules = self._rules(table)
        if not rules.gives:
            return False
        end = self._runtime.requests.held[table.request_id].prefill_end
        return rules.evict_during != "prefill" or table.num_tokens <= end

    def _givers(self, tables: list[TokenTable]) -> Givers:
        rows: Ints = np.array([table.row for table in tables], dtype=np.int64)
        step_blocks = np.maximum(1, -(-self._intervals(tables) // self._size))
        givers = self._runtime.demand.givers(rows, self._budgets(tables), self.config)
        return givers._replace(step_blocks=step_blocks)

    def _budgets(self, tables: list[TokenTable]) -> Ints:
        budgets = [self._rules(table).budget_tokens for table in tables]
        return np.array(budgets, dtype=np.int64)

    def _intervals(self, tables: list[TokenTable]) -> Ints:
        intervals = [self._rules(table).interval_tokens for table in tables]
        return np.array(intervals, dtype=np.int64)

    def _rules(self, table: TokenTable) -> VTokenConfig:
        return self._runtime.requests.rules(table.request_id, self.config)

    def patience_left_s(self, demand: Demand) -> float:
        """How much longer the request of `demand` waits before others give for it; at most 0: not
        longer.
        """
        admission = self._runtime.admission
        return admission.patience_left_s(demand, time.monotonic(), self.config)
