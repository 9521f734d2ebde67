"""Restoring: when parked tokens become live again, whose, and where they go.

Tokens come back while memory is ample: nothing is short or near to it, nobody waits for blocks, and
a shortage is `restore_after_ms` past. A client or an operator may ask for a request, which only
spares it that wait. How far:

    under `pressure`, and under policy `none`     all of them
    under `always`                                up to the budget, so that a raised one acts

The blocks that restores may take in a step are

    free blocks - headroom - low watermark - growth of running requests (the bound of `is_near`)

and their copies take about `RESTORE_US` at the measured price. The most important priority comes
first, of these whoever keeps the smallest share of its tokens, and of its tokens the newest
victims, which ranked highest. They go into holes of the request's own blocks, then behind its last
token, then into fresh blocks.

Invariants:
1. a request restores in no step in which it evicts or is relocated, and has one of these in flight
2. destinations are in private, unhashed blocks (I4)
3. a restore leaves nobody short: what it takes was free beside all that is reserved
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.base.errors import InvariantViolation
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.admission import Admission
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.due import NEVER, phases
from vtoken.core.runtime.parking import Parking
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.requests import Requests
from vtoken.core.runtime.shortage import ShortageMonitor
from vtoken.core.tables.token_table import TokenTable
from vtoken.wire.status import ParkWait

RESTORE_US = 20_000.0  # what restores may add to a step
BACK_S = 10.0  # for so long tokens that came back are told


class Return(NamedTuple):
    """Parked tokens `ids` [n] of one request that come back, ascending, and their `places` [n] in
    its block table, the last of them in `num_blocks` fresh blocks.
    """

    table: TokenTable
    ids: Ints
    places: Ints
    num_blocks: int


class Returns(NamedTuple):
    """What would come back without a wait, and what keeps other parked tokens from it."""

    parts: list[Return]
    waits_for: ParkWait

    @property
    def num_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def num_blocks(self) -> int:
        return sum(part.num_blocks for part in self.parts)


@dataclass(eq=False)
class Restorer:
    """Brings the parked tokens of one runtime back.

    `asked`: requests that do not wait for `restore_after_ms`, until all of theirs are back.
    `after_guard`: a guard reverted the configuration, and no block was short since.
    """

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _parking: Parking
    _prices: Prices
    _admission: Admission
    _shortages: ShortageMonitor
    asked: set[str] = field(default_factory=set)
    after_guard: bool = False

    def __post_init__(self) -> None:
        self._last_short_s = self._last_back_s = -float("inf")  # monotonic
        self._back = 0  # tokens restored since the last shortage

    # ------------------------------------------------------------ when

    def ask(self, request_id: str) -> None:
        """Bring the tokens of a request back as soon as memory allows it."""
        self.asked.add(request_id)

    def waits_for(self) -> ParkWait:
        """What keeps parked tokens from coming back now; "" if nothing does, or none is parked."""
        if not self._parking.num_parked:
            return ""
        config = self._active.config
        if config.reclamation != "auto":
            return "resume"
        if not self._wanted_under(config, self._requests.tables)[1].any():
            return "budget"
        if not self.spare_blocks(config):
            return "memory"
        return "time" if self._recently_short(config) else ""

    @property
    def back_tokens(self) -> int:
        """Tokens restored since the last shortage; 0 once none has come back for `BACK_S`."""
        return self._back if time.monotonic() - self._last_back_s < BACK_S else 0

    def _recently_short(self, config: VTokenConfig) -> bool:
        return time.monotonic() - self._last_short_s < config.restore_after_ms / 1000

    def _is_short(self) -> bool:
        return self._current.is_short_soon or self._admission.demand is not None

    def spare_blocks(self, config: VTokenConfig) -> int:
        """The blocks that restores may take now; 0 if one is short or nearly so, or waited for."""
        if self._is_short():
            return 0
        reserved = config.headroom_blocks + config.low_watermark_blocks
        return max(0, self._store.num_free_blocks() - reserved - self._shortages.near_growth())

    # ------------------------------------------------------------ how far

    def _wanted(self, rows: Ints, budgets: Ints) -> Ints:
        """How many parked tokens of `rows` [k] come back within `budgets` [k], if memory allows it.

        A budget is `NEVER` where all may come back.
        """
        columns = self._requests.tables.columns
        to_budget = np.maximum(0, budgets - columns.num_live[rows])
        wanted: Ints = np.minimum(columns.num_parked[rows], to_budget)
        return wanted

    def _wanted_now(self, rows: Ints) -> Ints:
        """The same under the rules of the step."""
        due = self._requests.due
        return self._wanted(rows, np.where(due.limit[rows] < NEVER, due.target[rows], NEVER))

    def _wanted_under(
        self, config: VTokenConfig, tables: Iterable[TokenTable]
    ) -> tuple[Ints, Ints]:
        """The same under `config` [k], after the rows [k]: those of `tables` with parked tokens."""
        parked = [table for table in tables if table.num_parked]
        rules = [self._requests.rules(table.request_id, config) for table in parked]
        budgets = [own.budget_tokens if phases(own)[0] < NEVER else NEVER for own in rules]
        rows = np.array([table.row for table in parked], dtype=np.int64)
        return rows, self._wanted(rows, np.array(budgets, dtype=np.int64))

    def plan(self, config: VTokenConfig, request_id: str | None = None) -> Returns:
        """What comes back under `config` of one request, or of all, as far as memory allows it now.

        Ignores the wait, the bound of a step, and that copies may still be under way.
        """
        tables = self._requests.tables
        chosen = tables if request_id is None else [tables[request_id]]
        rows, wanted = self._wanted_under(config, chosen)
        if len(rows) == 0:
            return Returns([], "")
        if config.reclamation != "auto":
            return Returns([], "resume")
        parts = self._parts(rows, wanted, self.spare_blocks(config))
        found = Returns(parts, "memory")
        if found.num_tokens < int(wanted.sum()):
            return found
        rest = int(tables.columns.num_parked[rows].sum()) - found.num_tokens
        return Returns(parts, "budget" if rest else "")

    def _parts(
        self, rows: Ints, wanted: Ints, blocks: int, most: int = NEVER, step: int = NEVER
    ) -> list[Return]:
        """What comes back of `rows` [k], up to `wanted` [k] tokens each and `most` in all, as long
        as `blocks` are left for it. `step`: only copies of steps up to this one.
        """
        tables, size = self._requests.tables, self._shape.block_size
        share = tables.columns.num_live[rows] / tables.columns.num_tokens[rows]
        order = np.lexsort((share, self._requests.due.priority[rows]))
        parts = []
        for row, count in zip(rows[order].tolist(), wanted[order].tolist(), strict=True):
            if most <= 0 or blocks <= 0:
                break
            table = tables.at(row)
            ids = self._parking.restorable(table, step)[: min(most, count)]
            places = tables.open_places(row, len(ids))
            fresh = min(blocks, self._shape.blocks_of(len(ids) - len(places)))
            behind = np.arange(fresh * size) + table.num_blocks * size
            places = np.append(places, behind)[: len(ids)]
            ids = np.sort(ids[: len(places)])
            if len(ids):
                parts.append(Return(table, ids, places, fresh))
            most, blocks = most - len(ids), blocks - fresh
        return parts

    # ------------------------------------------------------------ a step

    def restore(self, short_blocks: int) -> None:
        """Restore what comes back in this step. `short_blocks`: the shortage of the step.

        Call after evictions and relocations are planned, and before places are chosen.
        """
        if short_blocks or self._admission.demand is not None:
            self._last_short_s, self._back = time.monotonic(), 0
            self.after_guard = False
        columns, config = self._requests.tables.columns, self._active.config
        rows = np.flatnonzero(columns.num_parked > 0)
        if len(rows) == 0:
            self.asked.clear()
            return
        if short_blocks or config.reclamation != "auto" or self._is_short():
            return
        rows = self._that_may(rows[self._wanted_now(rows) > 0])
        if self._recently_short(config):
            asked = [self._requests.tables.names[row] in self.asked for row in rows.tolist()]
            rows = rows[np.array(asked, dtype=np.bool_)]
        if len(rows) == 0:
            return
        blocks, most = self.spare_blocks(config), self._most_tokens(config)
        reported = self._parking.reported_step
        parts = self._parts(rows, self._wanted_now(rows), blocks, most, reported)
        restored = [part for part in parts if self._restore(part)]
        if restored:
            self._report(restored)

    def _that_may(self, rows: Ints) -> Ints:
        """Those of `rows` [k] that neither evict nor move in this step, nor have copies in
        flight.
        """
        decisions = self._current.decisions
        rows = rows[self._requests.due.in_flight[rows] == 0]
        busy = np.append(decisions.evicted_rows, [*decisions.moved, *decisions.blocks])
        free: Ints = rows[~np.isin(rows, busy)]
        return free

    def _most_tokens(self, config: VTokenConfig) -> int:
        """How many tokens a step restores at most: at least a block."""
        size, price = self._shape.block_size, self._prices.restore_us
        return max(size, int(RESTORE_US / price) if price else config.batch_size * size)

    def _restore(self, part: Return) -> bool:
        """Make the tokens of one request live; returns whether nothing was wrong with the plan."""
        table, ids, places, num_blocks = part
        fresh = self._store.take(num_blocks) if num_blocks else []
        try:
            slots = self._requests.tables.restore(
                table.row, ids, places, np.array(fresh, dtype=np.int64)
            )
        except InvariantViolation as violation:  # nothing changed
            self._current.violated(violation)
            self._store.give_back(fresh)
            return False
        blocks_written = sorted({*(slots // self._shape.block_size).tolist()})
        self._current.check_private(self._store, blocks_written, "restored tokens")
        self._current.decisions.restored[table.row] = ids, slots
        if fresh:
            self._current.decisions.blocks[table.row] = table.block_ids()
            self._store.rebind(table.request_id, table.blocks)
        self._requests.due.in_flight[table.row] = self._current.number
        self._parking.restore(table, ids, slots)
        return True

    def _report(self, parts: list[Return]) -> None:
        """Add the event of a step that restores `parts`."""
        restored = {part.table.request_id: len(part.ids) for part in parts}
        num_blocks = sum(part.num_blocks for part in parts)
        self._last_back_s, self._back = time.monotonic(), self._back + sum(restored.values())
        self._parking.note_restored(restored, num_blocks, self._reason(restored))

    def _reason(self, restored: Iterable[str]) -> str:
        """Why the tokens of these requests came back."""
        if self.asked.issuperset(restored):
            return "asked"
        if self.after_guard:
            return "guard"
        rows = [self._requests.tables.rows[name] for name in restored]
        by_length = bool(np.all(self._requests.due.limit[rows] < NEVER))
        return "budget" if by_length else "memory"
