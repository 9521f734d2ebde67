"""Plans and prices a round as it would run now, or after an eviction, without changing anything.

The relocator applies its results; dry runs and explanations call the same code, so all see the same
layouts, holders and headroom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs

from vtoken.base.arrays import Bools, Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.planning.planner import Layout
from vtoken.core.planning.round import Round, plan_round
from vtoken.core.planning.sharing import keeps_dead_shared_blocks
from vtoken.core.planning.worth import MAX_STEPS, Estimate, RequestColumns, Worth, estimate_round
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.due import NEVER, phases
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.requests import Requests
from vtoken.core.tables.token_table import TokenTable

NOTHING = Estimate(0.0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Preview:
    """A round that has not been applied.

    `available_blocks`: fresh blocks that it may take. `holders` [N]: how many requests hold each
    block when it runs. After an eviction, `emptied_blocks`: blocks that it returns to the pool;
    `layouts`: the requests that then have excess blocks.
    """

    round: Round
    available_blocks: int
    holders: npt.NDArray[np.uint16]
    emptied_blocks: int = 0
    layouts: tuple[Layout, ...] = ()


@dataclass(eq=False)
class RoundPlanner:
    """Plans the rounds of one runtime, and estimates their worth at the measured prices."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _prices: Prices

    def preview(
        self,
        config: VTokenConfig,
        *,
        request_ids: Iterable[str] | None = None,
        batch_size: int | None = None,
    ) -> Preview:
        """The round that `config` would run now, over `request_ids` or all requests.

        Skips requests with a relocation in flight (I4). `batch_size` overrides B of `config`.
        """
        tables, rows = self._requests.tables, None
        if request_ids is not None:
            rows = np.array([tables[name].row for name in request_ids], dtype=np.int64)
        holders = tables.pool.holders
        found, available = self._plan(self._layouts(config, rows), config, holders, batch_size)
        return Preview(found, available, holders)

    def preview_after(self, config: VTokenConfig, victims: Mapping[str, Ints]) -> Preview:
        """The round that `config` would run once the tokens `victims`, by request, are dead.

        All-dead blocks are dropped first. Requests with a relocation in flight are included. With
        reclamation `off` there is no round.
        """
        tables = self._requests.tables
        emptied: Counter[int] = Counter()
        layouts: list[Layout] = []
        for table in tables:
            dead = victims.get(table.request_id, NO_IDS)
            if len(dead) == 0 and not table.virtual:
                continue
            layout = self._layout_of(table, config, dead)
            stays = np.count_nonzero(layout.grid >= 0, axis=1) > 0
            if keeps_dead_shared_blocks(config):
                stays |= ~layout.movable
            emptied.update(layout.blocks[~stays].tolist())
            kept = Layout(
                layout.request_id,
                layout.blocks[stays],
                layout.grid[stays],
                layout.movable[stays],
                layout.writable[stays],
                config.recycles,
            )
            if len(kept.blocks) > self._shape.needed_blocks(table.num_live - len(dead)):
                layouts.append(kept)
        holders = tables.pool.holders.copy()
        for block, n in emptied.items():
            holders[block] -= n
        num_emptied = sum(int(holders[block]) == 0 for block in emptied)
        # A block that all other holders drop is private by then.
        layouts = [structs.replace(x, movable=holders[x.blocks] == 1) for x in layouts]
        layouts.sort(key=lambda layout: int(np.count_nonzero(layout.grid < 0)), reverse=True)
        if config.reclamation == "off":
            found, available = Round((), 0), self.headroom(config)
        else:
            found, available = self._plan(layouts, config, holders)
        return Preview(found, available, holders, num_emptied, tuple(layouts))

    def num_excess(self, rows: Ints) -> Ints:
        """Blocks [k] beyond their need that requests `rows` [k] hold; 0 for those that have evicted
        nothing: only their last block can have free slots.
        """
        columns = self._requests.tables.columns
        excess = columns.num_blocks[rows] - self._shape.needed_blocks(columns.num_live[rows])
        movable: Ints = np.maximum(excess, 0) * (columns.virtual[rows] != 0)
        return movable

    def headroom(self, config: VTokenConfig) -> int:
        """Fresh blocks that one round may take now."""
        return min(config.headroom_blocks, self._store.num_free_blocks())

    def movable_rows(self, rows: Ints | None = None) -> Ints:
        """Those of `rows` [k], or of all, that a round considers; without any, it frees nothing."""
        rows = self._requests.tables.all_rows if rows is None else rows
        in_flight = self._requests.due.in_flight[rows]
        movable: Ints = rows[(self.num_excess(rows) > 0) & (in_flight == 0)]
        return movable

    def _plan(
        self,
        layouts: Iterable[Layout],
        config: VTokenConfig,
        holders: npt.NDArray[np.uint16],
        batch_size: int | None = None,
    ) -> tuple[Round, int]:
        """The round over `layouts`, and the fresh blocks that it may take."""
        available = self.headroom(config)
        found = plan_round(
            layouts,
            config,
            holders=holders,
            batch_size=batch_size or config.batch_size,
            headroom_blocks=available,
        )
        return found, available

    def _layouts(self, config: VTokenConfig, rows: Ints | None) -> Iterator[Layout]:
        """The layouts of `movable_rows`, most empty slots first, created lazily."""
        tables, columns, size = (
            self._requests.tables,
            self._requests.tables.columns,
            self._shape.block_size,
        )
        rows = self.movable_rows(rows)
        order = np.argsort(columns.num_live[rows] - columns.num_blocks[rows] * size, kind="stable")
        return (self._layout_of(tables.at(row), config) for row in rows[order].tolist())

    def _layout_of(self, table: TokenTable, config: VTokenConfig, dead: Ints = NO_IDS) -> Layout:
        """The planner's layout of one table; `dead`: ids to treat as dead."""
        grid = table.grid()
        if len(dead):
            grid[np.isin(grid, dead)] = -1
        blocks = table.block_ids()
        # Neither new nor relocated tokens are ever written to read-only blocks. All other blocks
        # are private and unhashed as long as they are held.
        movable = self._requests.tables.pool.holders[blocks] == 1
        if table.virtual:
            writable = ~table.readonly
        else:
            writable = np.array([self._store.is_writable(b) for b in blocks.tolist()])
        return Layout(table.request_id, blocks, grid, movable, writable, config.recycles)

    # ------------------------------------------------------------ worth

    def worth(self, config: VTokenConfig) -> Worth | None:
        """The worth of a round under `config` now; None where holes have no price."""
        if not self._prices.hole_us:
            return None
        return self._prices.worth(self.estimate(config))

    def worth_after(self, config: VTokenConfig, layouts: Sequence[Layout]) -> Worth | None:
        """The worth of a round over `layouts`, those of `preview_after`."""
        if not self._prices.hole_us:
            return None
        requests = self._requests
        rules = [requests.rules(layout.request_id, config) for layout in layouts]
        live = [layout.grid >= 0 for layout in layouts]
        rows = [requests.tables[layout.request_id].row for layout in layouts]
        facts = [
            (
                np.count_nonzero(is_live),
                np.flatnonzero(is_live).max(initial=-1) + 1,
                len(is_live),
                np.count_nonzero(is_live.all(axis=1)),
                phases(own)[0],
                own.budget_tokens,
            )
            for is_live, own in zip(live, rules, strict=True)
        ]
        columns = np.array(facts, dtype=np.int64).reshape(-1, 6).T
        left = requests.left_of_prompts(np.array(rows, dtype=np.int64))
        return self._prices.worth(self._estimate(np.ascontiguousarray(columns), left > 0, config))

    def estimate(self, config: VTokenConfig) -> Estimate:
        """The estimate of a round now, without requests that have a relocation in flight (I4)."""
        columns, due = self._requests.tables.columns, self._requests.due
        rows = self.movable_rows()
        rows = rows[columns.extent[rows] > columns.num_live[rows]]
        if len(rows) == 0:
            return NOTHING
        facts = (columns.num_live, columns.extent, columns.num_blocks, columns.num_full)
        return self._estimate(
            np.array([column[rows] for column in (*facts, due.limit, due.target)]),
            self._requests.left_of_prompts(rows) > 0,
            config,
        )

    def _estimate(self, facts: Ints, in_prompt: Bools, config: VTokenConfig) -> Estimate:
        """The estimate of a round over k requests. `facts` [6, k]: n, E, b and f of
        `vtoken.core.planning.worth`, budget + interval, budget.

        Assumes that a prompt's next chunk evicts from all of the request's blocks.
        """
        num_live, extent, num_blocks, num_full, limit, budget = facts
        evicts = limit < NEVER
        due_in = np.where(evicts, np.maximum(1, limit + 1 - num_live), MAX_STEPS)
        dying = np.where(evicts, limit - budget + 1, 0)
        columns = RequestColumns(
            num_live,
            extent,
            num_blocks,
            num_full,
            np.where(in_prompt, 1, due_in),
            np.where(in_prompt, num_blocks, dying),
        )
        return estimate_round(
            columns,
            self._shape.block_size,
            recycles=config.recycles,
            fills_holes=config.experiment.planner == "plug",
        )
