"""Plans a round as it would run now, or after an eviction, without changing anything.

The relocator applies its results; dry runs and explanations call the same code, so all see the same
layouts, holders and headroom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs

from vtoken.base.arrays import Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.planner import Layout, num_excess_blocks
from vtoken.core.planning.round import Round, plan_round
from vtoken.core.planning.sharing import keeps_dead_shared_blocks
from vtoken.core.protocol.step import NO_IDS
from vtoken.core.runtime.state import RuntimeState
from vtoken.core.tables.token_table import TokenTable


@dataclass(frozen=True, slots=True)
class Preview:
    """A round that has not been applied.

    `available_blocks`: fresh blocks that it may take. `holders` [N]: how many requests hold each
    block when it runs. `emptied_blocks`: blocks that the preceding eviction returns to the pool.
    """

    round: Round
    available_blocks: int
    holders: npt.NDArray[np.uint16]
    emptied_blocks: int = 0


class RoundPlanner:
    """Plans the rounds of one runtime."""

    def __init__(self, state: RuntimeState) -> None:
        self._state = state

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
        holders = self._state.tables.pool.holders
        return self._plan(self._layouts(config, request_ids), config, holders, batch_size)

    def preview_after(self, config: VTokenConfig, victims: Mapping[str, Ints]) -> Preview:
        """The round that `config` would run once the tokens `victims`, by request, are dead.

        All-dead blocks are dropped first. Requests with a relocation in flight are included. With
        reclamation `off` there is no round.
        """
        tables = self._state.tables
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
            num_live = table.num_live - len(dead)
            if self._num_excess(len(kept.blocks), num_live) > 0:
                layouts.append(kept)
        holders = tables.pool.holders.copy()
        for block, n in emptied.items():
            holders[block] -= n
        num_emptied = sum(int(holders[block]) == 0 for block in emptied)
        if config.reclamation == "off":
            return Preview(Round((), 0), self.headroom(config), holders, num_emptied)
        # A block that all other holders drop is private by then.
        layouts = [structs.replace(x, movable=holders[x.blocks] == 1) for x in layouts]
        layouts.sort(key=lambda layout: int(np.count_nonzero(layout.grid < 0)), reverse=True)
        return self._plan(layouts, config, holders, None, num_emptied)

    def has_excess(self, table: TokenTable) -> bool:
        """Whether the request has evicted and holds excess blocks."""
        return table.virtual and self._num_excess(table.num_blocks, table.num_live) > 0

    def _num_excess(self, num_blocks: int, num_live: int) -> int:
        size, max_drafts = self._state.geometry.block_size, self._state.max_drafts
        return num_excess_blocks(num_blocks, num_live, size, max_drafts=max_drafts)

    def headroom(self, config: VTokenConfig) -> int:
        """Fresh blocks that one round may take now."""
        return min(config.headroom_blocks, self._state.store.num_free_blocks())

    def movable(self, request_ids: Iterable[str] | None = None) -> list[TokenTable]:
        """Tables that a round considers, most empty slots first; without any, it frees nothing."""
        tables, columns = self._state.tables, self._state.tables.columns
        size, in_flight = self._state.geometry.block_size, self._state.due.in_flight
        if request_ids is None:
            rows = tables.all_rows
        else:
            rows = np.array([tables[name].row for name in request_ids], dtype=np.int64)
        needed = self._state.needed_blocks(columns.num_live[rows])
        excess = columns.num_blocks[rows] > needed  # `num_excess_blocks` > 0
        rows = rows[excess & (columns.virtual[rows] != 0) & (in_flight[rows] == 0)]
        order = np.argsort(columns.num_live[rows] - columns.num_blocks[rows] * size, kind="stable")
        return [tables.at(row) for row in rows[order].tolist()]

    def _plan(
        self,
        layouts: Iterable[Layout],
        config: VTokenConfig,
        holders: npt.NDArray[np.uint16],
        batch_size: int | None,
        emptied_blocks: int = 0,
    ) -> Preview:
        available = self.headroom(config)
        found = plan_round(
            layouts,
            config,
            holders=holders,
            batch_size=batch_size or config.batch_size,
            headroom_blocks=available,
        )
        return Preview(found, available, holders, emptied_blocks)

    def _layouts(
        self, config: VTokenConfig, request_ids: Iterable[str] | None = None
    ) -> Iterator[Layout]:
        """The layouts of `movable`, created lazily."""
        return (self._layout_of(table, config) for table in self.movable(request_ids))

    def _layout_of(self, table: TokenTable, config: VTokenConfig, dead: Ints = NO_IDS) -> Layout:
        """The planner's layout of one table; `dead`: ids to treat as dead."""
        grid = table.grid()
        if len(dead):
            grid[np.isin(grid, dead)] = -1
        blocks = table.block_ids()
        # Neither new nor relocated tokens are ever written to read-only blocks. All other blocks
        # are private and unhashed as long as they are held.
        movable = self._state.tables.pool.holders[blocks] == 1
        if table.virtual:
            writable = ~table.readonly
        else:
            writable = np.array([self._state.store.is_writable(b) for b in blocks.tolist()])
        return Layout(table.request_id, blocks, grid, movable, writable, config.recycles)
