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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.giving import share_out
from vtoken.core.runtime.admission import Admission
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.state import RuntimeState
from vtoken.policies.signals import WARM_QUERIES


@dataclass(frozen=True, slots=True)
class Shortage:
    """The terms of one step, in blocks; see above. `now_blocks`: the growth of this step alone."""

    now_blocks: int = 0
    growth_blocks: int = 0
    asked_blocks: int = 0
    headroom_blocks: int = 0
    free_blocks: int = 0

    @property
    def missing_blocks(self) -> int:
        """Blocks that running requests need at once and that are not free; at most 0: none."""
        return self.now_blocks - self.free_blocks

    @property
    def blocks(self) -> int:
        """How many blocks are short; 0 if none."""
        needed = self.growth_blocks + self.asked_blocks
        if needed == 0:
            return 0
        return max(0, needed + self.headroom_blocks - self.free_blocks)

    def to_give(self, most_asked: int) -> int:
        """Blocks that requests give in this step; at most `most_asked` for a waiting request."""
        growth = self.growth_blocks + self.headroom_blocks - self.free_blocks
        return min(self.blocks, max(growth, most_asked))


NO_SHORTAGE = Shortage()
AHEAD_STEPS = 2
ADMISSION_US = 20_000.0  # what giving for a waiting request may add to a step
MARGIN = 2  # scores are requested of those who would give this many times the shortage


class ShortageMonitor:
    """Measures the shortage of one runtime and shares it out.

    `max_step_tokens`: the most tokens that the engine computes in one step.
    """

    def __init__(
        self, state: RuntimeState, admission: Admission, prices: Prices, max_step_tokens: int
    ) -> None:
        self._max_step_tokens = max_step_tokens
        self._state = state
        self._admission = admission
        self._prices = prices
        self.newest = NO_SHORTAGE  # of the newest step

    def is_near(self) -> bool:
        """Whether a request might have to give tokens before its signal is complete.

        A signal takes up to `WARM_QUERIES` steps. The bound takes every running request to grow in
        each of them, and every prompt to be completed.
        """
        state, size = self._state, self._state.geometry.block_size
        if not state.may_evict or len(state.giving_rows()) == 0:
            return False
        if self._admission.demand is not None:
            return True
        rows = state.tables.all_rows
        steps = WARM_QUERIES + 2 * (state.report_lag_steps + 1)
        left = state.left_of_prompts(rows)
        growth = len(rows) * (1 + steps // size) + int(np.maximum(left, 0).sum()) // size
        free = state.store.num_free_blocks()
        return free < growth + state.config.headroom_blocks

    def measure(
        self, ready: list[str], prefilling: Sequence[tuple[str, int]], free_blocks: int
    ) -> Shortage:
        """The shortage of the coming step. `ready` and `prefilling`: as in `Runtime.begin_step`.

        `free_blocks`: those of the pool, and those that this step has returned so far.
        """
        now, soon = self._growth(self._state.tables.rows_of(ready), prefilling)
        self.newest = self._shortage(now, soon, free_blocks)
        return self.newest

    def growth(self) -> tuple[int, int]:
        """Blocks that running requests take in the coming step, and in `AHEAD_STEPS` steps, if each
        computes as much as it can.
        """
        state, tables = self._state, self._state.tables
        rows, chunk = tables.all_rows, self._admission.max_chunk_tokens
        left = state.left_of_prompts(rows)
        prefilling = zip(rows[left > 0].tolist(), left[left > 0].tolist(), strict=True)
        chunks = [(tables.names[row], min(num_left, chunk)) for row, num_left in prefilling]
        return self._growth(rows[left <= 0], chunks)

    def _growth(self, rows: Ints, prefilling: Sequence[tuple[str, int]]) -> tuple[int, int]:
        """`growth` of decoding `rows` and of `prefilling`."""
        prompts, extents = self._prompt_growth(prefilling), self._next_extents(rows)
        now = self._decode_growth(rows, extents, 1)
        return now + prompts, self._decode_growth(rows, extents, AHEAD_STEPS) + prompts

    def _shortage(self, now_blocks: int, growth_blocks: int, free_blocks: int) -> Shortage:
        return Shortage(
            now_blocks,
            growth_blocks,
            self._admission.asked_blocks(time.monotonic()),
            self._state.config.headroom_blocks,
            free_blocks,
        )

    def _next_extents(self, rows: Ints) -> Ints:
        """The places that one more token of each of `rows` [k] requires [k]."""
        state = self._state
        if not state.tables.any_virtual:
            return state.tables.columns.extent[rows] + 1
        # A hole may take the next token, if its block is writable.
        places = state.tables.choose_places(recycling=state.config.recycles)
        return np.array(places.next_extent, dtype=np.int64)[rows]

    def _decode_growth(self, rows: Ints, extents: Ints, steps: int) -> int:
        """Blocks that `rows` take if each appends `steps` tokens; `extents`: `_next_extents`."""
        needed = -(-(extents + steps - 1) // self._state.geometry.block_size)
        return int(np.maximum(0, needed - self._state.tables.columns.num_blocks[rows]).sum())

    def _prompt_growth(self, prefilling: Sequence[tuple[str, int]]) -> int:
        """Blocks that the next chunks take, `max_step_tokens` tokens at most."""
        state = self._state
        size, blocks, num_left = state.geometry.block_size, 0, self._max_step_tokens
        for name, num_new in prefilling:
            table = state.tables.get(name)
            if table is not None and num_left > 0:
                taken = min(num_new, num_left)
                num_left -= taken
                blocks += max(0, -(-(table.append_start + taken) // size) - table.num_blocks)
        return blocks

    def to_give(self, shortage: Shortage, config: VTokenConfig) -> int:
        """Blocks that requests give in one step under `config`, at least 1 of those that are asked.

        Relocation copies at most the tokens of a block to free it.
        """
        block_us = self._state.geometry.block_size * self._prices.copy_us
        most = int(ADMISSION_US / block_us) if block_us else config.batch_size
        return shortage.to_give(max(1, min(most, config.batch_size)))

    def share(self, rows: Ints, least: Ints, shortage: Shortage) -> Ints:
        """Those of `rows` [k] that give in this step; sets the live tokens that each keeps, at
        least `least` [k].
        """
        blocks = self.to_give(shortage, self._state.config)
        kept, gives = self._shared_out(rows, least, blocks)
        self._state.due.target[rows[gives]] = kept[gives]
        return rows[gives]

    def _shared_out(self, rows: Ints, least: Ints, blocks: int) -> tuple[Ints, Ints]:
        """The tokens that `rows` [k] keep [k], at least `least` [k], and the indices of those that
        give.
        """
        state = self._state
        if blocks == 0 or len(rows) == 0:
            return state.tables.columns.num_live[rows], rows[:0]
        givers = self._admission.givers(rows)._replace(floor=least)
        kept = share_out(givers, blocks, block_size=state.geometry.block_size)
        return kept, np.flatnonzero(kept < givers.live)

    def soon(self, rows: Ints) -> Ints:
        """Those of the scheduled `rows` [k] that are to give within the steps that their scores
        take to arrive, if nothing unforeseen happens.
        """
        state = self._state
        if not state.is_short_soon:
            return rows[:0]
        steps = AHEAD_STEPS + 1 + state.report_lag_steps
        left = state.left_of_prompts(rows)
        chunks = min(int(np.maximum(left, 0).sum()), steps * self._max_step_tokens)
        growth = self._decode_growth(rows, self._next_extents(rows), steps)
        growth += -(-chunks // state.geometry.block_size)
        shortage = self._shortage(growth, growth, state.store.num_free_blocks())
        if shortage.blocks == 0:
            return rows[:0]
        columns = state.tables.columns
        able = rows[columns.num_live[rows] > state.due.floor[rows]]
        blocks = MARGIN * self.to_give(shortage, state.config)
        _, gives = self._shared_out(able, state.due.floor[able], blocks)
        return able[gives]
