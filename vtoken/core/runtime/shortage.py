"""Shortage of blocks: whether somebody needs memory now, and who gives tokens for it.

For requests under `evict_when: pressure`. Independent of policies' choices and of the engine. With
all numbers in blocks,

    shortage = growth of running requests in the coming `AHEAD_STEPS` steps
             + what the first waiting request must find free, if others may give for it
             + the headroom, if one of these is not 0
             - free blocks, those of the prefix cache included

Growth is counted ahead because relocating what was given takes free blocks too, and because a step
may give only what its round can pack.

Invariants:
1. without a shortage nobody gives a token, and while none is near (`is_near`) no signal is computed
2. excess blocks of requests with holes are reclaimed before anybody gives
3. nobody is cut down below its floor, its budget
4. growth is never bounded: the alternative is a preemption. What is given for a waiting request is
   at most B blocks in a step, and about as many as `ADMISSION_US` can copy at the measured price,
   so that its admission does not stall the others
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.planning.giving import share_out
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.admission import Admission
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.demand import AHEAD_STEPS, DemandBook, Growth
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.parking import Parking
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.requests import Requests
from vtoken.policies.signals import WARM_QUERIES


@dataclass(frozen=True, slots=True)
class Shortage:
    """The terms of one step, in blocks; see above. `now_blocks`: the growth of this step alone.

    `future_blocks`, `givable_blocks`: what running requests will take until their ends, the
    headroom included, and what they can give. Both are 0 in a shortage that requests give for,
    because what they can give is enough there.
    """

    now_blocks: int = 0
    growth_blocks: int = 0
    asked_blocks: int = 0
    headroom_blocks: int = 0
    free_blocks: int = 0
    future_blocks: int = 0
    givable_blocks: int = 0

    @property
    def missing_blocks(self) -> int:
        """Blocks that running requests need at once and that are not free; at most 0: none."""
        return self.now_blocks - self.free_blocks

    @property
    def blocks(self) -> int:
        """How many blocks are short; 0 if none.

        A waiting request starts when its blocks are free, and what running ones will take until
        their ends is free or can be given.
        """
        needed = self.growth_blocks + self.asked_blocks
        if needed == 0:
            return 0
        needed += self.headroom_blocks
        if self.asked_blocks:
            needed = max(needed, self.asked_blocks + self.future_blocks - self.givable_blocks)
        return max(0, needed - self.free_blocks)

    @property
    def is_enough_given(self) -> bool:
        """Whether the first waiting request fits with all that is free and can be given."""
        needed = self.asked_blocks + self.future_blocks
        return self.asked_blocks == 0 or needed <= self.free_blocks + self.givable_blocks

    def to_give(self, most_asked: int) -> int:
        """Blocks that requests give in this step; at most `most_asked` for a waiting request.

        Whoever would take a block gives first, so the growth comes on top: else what is given in
        every step only makes up for it, and nobody ever starts.
        """
        growth = self.growth_blocks + self.headroom_blocks - self.free_blocks
        return min(self.blocks, max(growth, self.growth_blocks + most_asked))


NO_SHORTAGE = Shortage()
ADMISSION_US = 20_000.0  # what giving for a waiting request may add to a step
MARGIN = 2  # scores are requested of those who would give this many times the shortage


@dataclass(eq=False)
class ShortageMonitor:
    """Measures the shortage of one runtime and shares it out."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _book: DemandBook
    _admission: Admission
    _prices: Prices
    _parking: Parking
    _others: OtherGroups

    def is_near(self) -> bool:
        """Whether a request might have to give tokens before its signal is complete.

        A signal takes up to `WARM_QUERIES` steps. The bound takes every running request to grow in
        each of them, and every prompt to be completed.
        """
        if not self._requests.may_evict or len(self._requests.giving_rows()) == 0:
            return False
        if self._admission.demand is not None:
            return True
        growth = self.near_growth()
        return self._store.num_free_blocks() < growth + self._active.config.headroom_blocks

    def near_growth(self) -> int:
        """The most blocks that running requests take before a shortage can be answered."""
        return self._book.bound(WARM_QUERIES + 2 * (self._shape.report_lag_steps + 1))

    def measure(
        self, ready: list[str], prefilling: Sequence[tuple[str, int]], free_blocks: int
    ) -> Shortage:
        """The shortage of the coming step. `ready` and `prefilling`: as in `Runtime.begin_step`.

        `free_blocks`: those of the pool, and those that this step has returned so far.
        """
        rows = self._requests.tables.rows_of(ready)
        return self._shortage(self._book.growth(rows, prefilling), free_blocks)

    def _shortage(self, growth: Growth, free_blocks: int) -> Shortage:
        headroom = self._active.config.headroom_blocks
        return Shortage(*growth, self._asked(growth.now), headroom, free_blocks)

    def _asked(self, now_blocks: int) -> int:
        """Blocks that must be free for the first waiting request, if others may give for it.

        0 within `evict_after_wait_ms` of its arrival, and if all that can be given is not enough.
        `now_blocks`: what running requests take in the coming step.
        """
        admission, config = self._admission, self._active.config
        demand = admission.demand
        if demand is None or admission.patience_left_s(demand, time.monotonic(), config) > 0:
            return 0
        standing = Shortage(
            asked_blocks=demand.needed_blocks,
            free_blocks=self._store.num_free_blocks(),
            future_blocks=admission.reserved_blocks(demand, config, now_blocks),
            givable_blocks=self._book.givable_blocks(),
        )
        return demand.needed_blocks if standing.is_enough_given else 0

    def to_give(self, shortage: Shortage, config: VTokenConfig) -> int:
        """Blocks that requests give in one step under `config`, at least 1 of those that are asked.

        To free a block, at most its tokens are relocated, and as many are parked.
        """
        parks = self._parking.parks_under(config)
        token_us = self._prices.copy_us + (self._prices.park_us if parks else 0.0)
        block_us = self._shape.block_size * token_us
        most = int(ADMISSION_US / block_us) if block_us else config.batch_size
        return shortage.to_give(max(1, min(most, config.batch_size)))

    def share(self, rows: Ints, least: Callable[[Ints], Ints], shortage: Shortage) -> Ints:
        """Those of `rows` [k] that give in this step; sets the live tokens that each keeps, at
        least `least(rows)` [k].

        Only those whose turn it is are asked, and all if one of them cannot give down to its floor:
        a request that gives nothing changes no other's turn.
        """
        due = self._requests.due
        blocks, floor = self.to_give(shortage, self._active.config), due.floor[rows]
        kept, gives = self._shared_out(rows, floor, blocks)
        if (least(rows[gives]) > floor[gives]).any():
            kept, gives = self._shared_out(rows, least(rows), blocks)
        due.target[rows[gives]] = kept[gives]
        return rows[gives]

    def _shared_out(self, rows: Ints, least: Ints, blocks: int) -> tuple[Ints, Ints]:
        """The tokens that `rows` [k] keep [k], at least `least` [k], and the indices of those that
        give.
        """
        if blocks == 0 or len(rows) == 0:
            return self._requests.tables.columns.num_live[rows], rows[:0]
        givers = self._book.givers(rows, least)
        kept = share_out(givers, blocks)
        return kept, np.flatnonzero(kept < givers.live)

    def soon(self, rows: Ints) -> Ints:
        """Those of the scheduled `rows` [k] that are to give within the steps that their scores
        take to arrive, if nothing unforeseen happens.
        """
        if not self._current.is_short_soon:
            return rows[:0]
        steps = AHEAD_STEPS + 1 + self._shape.report_lag_steps
        left = self._requests.left_of_prompts(rows)
        chunks = min(int(np.maximum(left, 0).sum()), steps * self._shape.max_step_tokens)
        growth = self._book.of_decoding(rows, steps)
        for size in (self._shape.block_size, *(group.block_size for group in self._others)):
            growth += -(-chunks // size)
        shortage = self._shortage(Growth(growth, growth), self._store.num_free_blocks())
        if shortage.blocks == 0:
            return rows[:0]
        floor = self._requests.due.floor
        able = rows[self._requests.tables.columns.num_live[rows] > floor[rows]]
        blocks = MARGIN * self.to_give(shortage, self._active.config)
        _, gives = self._shared_out(able, floor[able], blocks)
        return able[gives]
