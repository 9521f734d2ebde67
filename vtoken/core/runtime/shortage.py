"""Shortage of blocks: whether somebody needs memory now, and who gives tokens for it.

For requests under `evict_when: pressure`. Independent of policies' choices and of the engine. With
all numbers in blocks,

    shortage = growth of running requests in the coming `AHEAD_STEPS` steps
             + what the first waiting request must find free, if others may give for it
             + the headroom, if one of these is not 0
             - free blocks, those of the prefix cache included

Growth is counted ahead because relocating what was given takes free blocks too, and because a step
may give only what its round can pack. Both demands are sums over all groups of layers, which share
the pool; only the group with token tables can give.

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
from vtoken.core.planning.giving import share_out
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.admission import Admission
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.engine_shape import EngineShape
from vtoken.core.runtime.other_groups import OtherGroups
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.requests import Requests
from vtoken.policies.signals import WARM_QUERIES
from vtoken.wire import MAX_TOKENS


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
        """Blocks that requests give in this step; at most `most_asked` for a waiting request."""
        growth = self.growth_blocks + self.headroom_blocks - self.free_blocks
        return min(self.blocks, max(growth, most_asked))


NO_SHORTAGE = Shortage()
AHEAD_STEPS = 2
ADMISSION_US = 20_000.0  # what giving for a waiting request may add to a step
MARGIN = 2  # scores are requested of those who would give this many times the shortage


class ShortageMonitor:
    """Measures the shortage of one runtime and shares it out."""

    def __init__(
        self,
        shape: EngineShape,
        store: BlockStore,
        requests: Requests,
        active: ActiveConfig,
        current: CurrentStep,
        admission: Admission,
        prices: Prices,
        others: OtherGroups,
    ) -> None:
        self._shape = shape
        self._store = store
        self._requests = requests
        self._active = active
        self._current = current
        self._others = others
        self._admission = admission
        self._prices = prices

    def is_near(self) -> bool:
        """Whether a request might have to give tokens before its signal is complete.

        A signal takes up to `WARM_QUERIES` steps. The bound takes every running request to grow in
        each of them, and every prompt to be completed.
        """
        size = self._shape.block_size
        if not self._requests.may_evict or len(self._requests.giving_rows()) == 0:
            return False
        if self._admission.demand is not None:
            return True
        rows = self._requests.tables.all_rows
        steps = WARM_QUERIES + 2 * (self._shape.report_lag_steps + 1)
        left, tokens = self._requests.left_of_prompts(rows), steps * (1 + self._shape.max_drafts)
        growth = len(rows) * (1 + tokens // size) + int(np.maximum(left, 0).sum()) // size
        growth += self._most_of_others(rows, left, tokens)
        free = self._store.num_free_blocks()
        return free < growth + self._active.config.headroom_blocks

    def _most_of_others(self, rows: Ints, left: Ints, num_new: int) -> int:
        """A bound of what other groups take for `rows` [k] to complete the `left` [k] tokens of
        their prompts and to compute `num_new` tokens each.
        """
        if not self._others:
            return 0
        most = 0
        tokens = self._requests.tables.columns.num_tokens[rows] + np.maximum(left, 0) + num_new
        for group in self._others:
            blocks = -(-tokens // group.block_size)
            for chosen, chunk in ((left > 0, self._shape.max_chunk_tokens), (left <= 0, 1)):
                in_flight = chunk * (1 + self._shape.report_lag_steps)
                limit = group.most_blocks(MAX_TOKENS, in_flight)
                most += int(np.minimum(blocks[chosen], limit).sum())
        free, pool = self._store.num_free_blocks(), self._requests.tables.pool
        held = self._shape.geometry.num_blocks - 1 - free - pool.num_used  # all but the null block
        return max(0, most - held)

    def measure(
        self, ready: list[str], prefilling: Sequence[tuple[str, int]], free_blocks: int
    ) -> Shortage:
        """The shortage of the coming step. `ready` and `prefilling`: as in `Runtime.begin_step`.

        `free_blocks`: those of the pool, and those that this step has returned so far.
        """
        now, soon = self._growth(self._requests.tables.rows_of(ready), prefilling)
        return self._shortage(now, soon, free_blocks)

    def growth(self) -> tuple[int, int]:
        """Blocks of all groups that running requests take in the coming step, and in `AHEAD_STEPS`
        steps, if each computes as much as it can.
        """
        tables = self._requests.tables
        rows, chunk = tables.all_rows, self._shape.max_chunk_tokens
        if self._requests.idle:
            rows = np.setdiff1d(rows, tables.rows_of([*self._requests.idle]))
        left = self._requests.left_of_prompts(rows)
        prefilling = zip(rows[left > 0].tolist(), left[left > 0].tolist(), strict=True)
        chunks = [(tables.names[row], min(num_left, chunk)) for row, num_left in prefilling]
        return self._growth(rows[left <= 0], chunks)

    def _growth(self, rows: Ints, prefilling: Sequence[tuple[str, int]]) -> tuple[int, int]:
        """`growth` of decoding `rows` and of `prefilling`."""
        prompts, now = self.prompt_growth(prefilling), self._decode_growth(rows, 1)
        soon = max(now, self._decode_growth(rows, AHEAD_STEPS))
        return now + prompts, soon + prompts

    def _shortage(self, now_blocks: int, growth_blocks: int, free_blocks: int) -> Shortage:
        return Shortage(
            now_blocks,
            growth_blocks,
            self._asked(now_blocks),
            self._active.config.headroom_blocks,
            free_blocks,
        )

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
            givable_blocks=admission.givable_now(),
        )
        return demand.needed_blocks if standing.is_enough_given else 0

    def _decode_growth(self, rows: Ints, steps: int) -> int:
        """Blocks of all groups that `rows` take in `steps` steps if every draft is accepted."""
        num_new = steps * (1 + self._shape.max_drafts)
        # A hole may take the next token, if its block is writable and no draft follows.
        recycling = self._active.config.recycles and not self._shape.max_drafts
        own = self._requests.tables.growth(rows, num_new, recycling=recycling)
        if not self._others:
            return int(own.sum())
        taking, tokens = own > 0, self._requests.tables.columns.num_tokens[rows]
        for group in self._others:  # most requests stay within their last block
            taking |= -(-(tokens + num_new) // group.block_size) > -(-tokens // group.block_size)
        rows, own = rows[taking], own[taking]
        return self._in_all_groups(rows, own, np.full_like(own, num_new), steps)

    def prompt_growth(self, prefilling: Sequence[tuple[str, int]]) -> int:
        """Blocks of all groups that the next chunks, of prompts or of drafts, take;
        `max_step_tokens` tokens at most.
        """
        if not prefilling:
            return 0
        tables, num_left = self._requests.tables, self._shape.max_step_tokens
        rows: list[int] = []
        chunks: list[int] = []
        for name, num_new in prefilling:
            row = tables.rows.get(name)
            if row is not None and num_left > 0:
                rows.append(row)
                chunks.append(min(num_new, num_left))
                num_left -= chunks[-1]
        places = np.array([tables.at(row).append_start for row in rows], dtype=np.int64)
        taken, chosen = np.array(chunks, dtype=np.int64), np.array(rows, dtype=np.int64)
        needed = -(-(places + taken) // self._shape.block_size)
        own = np.maximum(0, needed - tables.columns.num_blocks[chosen])
        return self._in_all_groups(chosen, own, taken, 1)

    def _in_all_groups(self, rows: Ints, own: Ints, num_new: Ints, steps: int) -> int:
        """Blocks that `rows` [k] take for `num_new` [k] tokens in `steps` steps, `own` [k] of them
        in the managed group.

        What a request's windows give back serves that request alone: others may come before it.
        """
        taken, names = own.copy(), self._requests.tables.names
        if self._others and len(rows):
            chosen = [names[row] for row in rows.tolist()]
            for group in self._others:
                taken += group.growth(chosen, num_new, steps)
        return int(np.maximum(0, taken).sum())

    def to_give(self, shortage: Shortage, config: VTokenConfig) -> int:
        """Blocks that requests give in one step under `config`, at least 1 of those that are asked.

        Relocation copies at most the tokens of a block to free it.
        """
        block_us = self._shape.block_size * self._prices.copy_us
        most = int(ADMISSION_US / block_us) if block_us else config.batch_size
        return shortage.to_give(max(1, min(most, config.batch_size)))

    def share(self, rows: Ints, least: Callable[[Ints], Ints], shortage: Shortage) -> Ints:
        """Those of `rows` [k] that give in this step; sets the live tokens that each keeps, at
        least `least(rows)` [k].

        Only those whose turn it is are asked, and all if one of them cannot give down to its floor:
        a request that gives nothing changes no other's turn.
        """
        blocks, floor = self.to_give(shortage, self._active.config), self._requests.due.floor[rows]
        kept, gives = self._shared_out(rows, floor, blocks)
        if (least(rows[gives]) > floor[gives]).any():
            kept, gives = self._shared_out(rows, least(rows), blocks)
        self._requests.due.target[rows[gives]] = kept[gives]
        return rows[gives]

    def _shared_out(self, rows: Ints, least: Ints, blocks: int) -> tuple[Ints, Ints]:
        """The tokens that `rows` [k] keep [k], at least `least` [k], and the indices of those that
        give.
        """
        if blocks == 0 or len(rows) == 0:
            return self._requests.tables.columns.num_live[rows], rows[:0]
        givers = self._admission.givers(rows)._replace(floor=least)
        kept = share_out(givers, blocks, block_size=self._shape.block_size)
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
        growth = self._decode_growth(rows, steps)
        for size in (self._shape.block_size, *(group.block_size for group in self._others)):
            growth += -(-chunks // size)
        shortage = self._shortage(growth, growth, self._store.num_free_blocks())
        if shortage.blocks == 0:
            return rows[:0]
        columns = self._requests.tables.columns
        able = rows[columns.num_live[rows] > self._requests.due.floor[rows]]
        blocks = MARGIN * self.to_give(shortage, self._active.config)
        _, gives = self._shared_out(able, self._requests.due.floor[able], blocks)
        return able[gives]
