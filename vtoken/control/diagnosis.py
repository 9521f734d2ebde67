"""Fragmented or full? What limits admission now and what would help, from the planner itself.

Reads the runtime, changes nothing. The pool is short when free blocks, less what a waiting request
lacks, are at the low watermark, or a waiting request lacks any. Fragmented: it is short, and
compacting would free some blocks. Full: compacting would not, and no more blocks are free than one
round may take, or a request waits for more.

The offer ("compacting now would free ...") is what a manual trigger would do at this moment: one
round of the real planner within B and the headroom. The planner is asked after every change of the
configuration; after a round, and every `OFFER_SECONDS`, only as often as takes `MAX_SHARE` of the
time at most: a plan of 3 ms is good for 6 s. In between,
1. the figures are what is certain to be left of the offer: they never promise more than a round
   frees. Whether there is anything to gain follows from what is likely to be left
2. the sentence states that compacting frees nothing, and why, as long as nothing has changed since
   the planner was asked, and while no request that a round would look at holds more blocks than it
   needs, which takes one look at every request and no plan. Else it gives the age of the plan
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from vtoken.config.values import VTokenConfig
from vtoken.control.advice import Situation, sentence
from vtoken.planning.gates import describe_gates, headroom_gate
from vtoken.planning.planner import RelocationPlan
from vtoken.runtime.relocation.round_planner import has_excess
from vtoken.runtime.runtime import Runtime
from vtoken.tables.token_table import TokenTable
from vtoken.wire import Cause, Fragmentation

Moment = tuple[int, int, int, int]  # the same as long as a round would find the same

OFFER_SECONDS = 0.1
MAX_SHARE = 0.0005  # of the engine's time that asking the planner may take


@dataclass(frozen=True, slots=True)
class Part:
    """What the round would have done with one table; `shared`: it is one of a group.

    `num_tokens`, `num_blocks`: those of the table then.
    """

    table: TokenTable
    freed_blocks: int
    moved_tokens: int
    fresh_blocks: int
    shared: bool
    num_tokens: int
    num_blocks: int

    @classmethod
    def of(cls, table: TokenTable, plan: RelocationPlan) -> Part:
        return cls(
            table,
            plan.num_freed_blocks,
            plan.num_moved_tokens,
            plan.num_fresh_blocks,
            bool(plan.shared_blocks),
            table.num_tokens,
            table.num_blocks,
        )

    def crowding(self) -> int:
        """Fresh blocks that the tokens which came since may take on top, at most: they have taken
        room that was to be filled."""
        return -(-(self.table.num_tokens - self.num_tokens) // self.table.block_size)

    def now(self) -> int:
        """Blocks that moving this request still frees, at least; those that left are free now."""
        table = self.table
        if not has_excess(table):
            return 0
        left = max(0, self.num_blocks - table.num_blocks)
        spare = table.num_blocks - -(-table.num_live // table.block_size)
        return min(self.freed_blocks - self.crowding() - left, spare)


@dataclass(frozen=True, slots=True)
class Gain:
    """What a round frees and moves at least, and whether it is likely to free anything."""

    likely: bool
    freed_blocks: int = 0
    moved_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """What one round would have done when the planner was last asked.

    `missing_blocks`: fresh blocks that it lacked for more than it has, `available_blocks`.
    `held_shared_blocks`: shared blocks with holes that `prefix_sharing` keeps where they are;
    `copy_freed_blocks`: what moving them too would free, asked where nothing else is to be gained,
    and `better_sharing` the tier that frees it: `index` where all of them are dead.
    """

    parts: tuple[Part, ...] = ()
    available_blocks: int = 0
    missing_blocks: int = 0
    held_shared_blocks: int = 0
    copy_freed_blocks: int = 0
    better_sharing: str = "copy"

    def now(self, runtime: Runtime) -> Gain:
        """What is left of it."""
        known, states = runtime.tables.get, runtime.state.requests
        parts = [
            part
            for part in self.parts
            if known(part.table.request_id) is part.table
            and not states[part.table.request_id].in_flight_step
        ]
        whole = len(parts) == len(self.parts)
        headroom = runtime.round_planner.headroom(runtime.config)
        freed = moved = 0
        likely = False
        for part in parts:
            if part.shared and not whole:
                continue
            likely = likely or part.shared or has_excess(part.table)
            headroom -= part.fresh_blocks + part.crowding()
            gain = part.freed_blocks if part.shared else part.now()
            if headroom >= 0 and (gain > 0 or part.shared):
                freed += gain
                moved += part.moved_tokens
        return Gain(likely, freed, moved) if freed > 0 else Gain(likely)


class Diagnosis:
    """Explains one runtime's memory; `count_waiting` tells how many requests wait."""

    def __init__(self, runtime: Runtime, count_waiting: Callable[[], int]) -> None:
        self._runtime = runtime
        self._count_waiting = count_waiting
        self._offer = Offer()
        self._offer_until = 0.0  # good for so long, if no round runs
        self._rest_until = 0.0  # the planner is not asked before
        self._asked_after = 0
        self._asked_at = 0.0
        self._asked_in: Moment = (-1, 0, 0, 0)
        self._asked_for: VTokenConfig | None = None

    def fragmentation(self, free: int, num_low: int) -> Fragmentation:
        """`free`: free blocks; `num_low`: used blocks that are at most half live."""
        runtime, config = self._runtime, self._runtime.config
        pool = runtime.tables.pool
        offer = self._current_offer()
        gain = offer.now(runtime)
        age_s = self._age_s()
        if age_s is not None and not gain.likely and not runtime.round_planner.movable():
            offer, age_s = Offer(available_blocks=runtime.round_planner.headroom(config)), None
        pressure = runtime.relocator.pressure(ahead=1, count_low_utilization=lambda: num_low)
        gates = describe_gates(config, pressure)
        gates.append(headroom_gate(offer.available_blocks, offer.missing_blocks, gains=gain.likely))
        lacking = runtime.admission.lacking_blocks if self._count_waiting() else 0
        short = free - runtime.state.wanted_blocks <= config.low_watermark_blocks or lacking > 0
        cause: Cause = "ok"
        if short and gain.likely:
            cause = "fragmented"
        elif free <= config.headroom_blocks or lacking > 0:
            cause = "full"
        moved_bytes = gain.moved_tokens * runtime.geometry.bytes_per_token
        situation = Situation(
            cause=cause,
            config=config,
            pressure=pressure,
            gates=gates,
            num_requests=len(runtime.tables),
            may_evict=runtime.state.may_evict,
            num_waiting=self._count_waiting(),
            lacking_blocks=lacking,
            withheld_blocks=runtime.admission.withheld_blocks,
            used_blocks=pool.num_used,
            used_slots=pool.num_used * runtime.geometry.block_size,
            live_tokens=pool.num_live,
            gains=gain.likely,
            freed_blocks=gain.freed_blocks,
            moved_bytes=moved_bytes,
            missing_blocks=offer.missing_blocks,
            available_blocks=offer.available_blocks,
            held_shared_blocks=offer.held_shared_blocks,
            copy_freed_blocks=offer.copy_freed_blocks,
            better_sharing=offer.better_sharing,
            planned_s=age_s,
        )
        return Fragmentation(
            f=pool.fragmentation,
            theta_f=config.theta_f,
            cause=cause,
            sentence=sentence(situation),
            reclaimable_blocks=gain.freed_blocks,
            reclaim_moved_tokens=gain.moved_tokens,
            reclaim_moved_bytes=moved_bytes,
            low_watermark_blocks=config.low_watermark_blocks,
            gates=gates,
        )

    def _current_offer(self) -> Offer:
        runtime = self._runtime
        if len(runtime.tables) == 0:
            return Offer(available_blocks=runtime.round_planner.headroom(runtime.config))
        rounds, config = runtime.relocator.num_rounds, runtime.config
        now = time.monotonic()
        due = now >= self._offer_until or rounds != self._asked_after
        if config is not self._asked_for or (due and now >= self._rest_until):
            started = time.thread_time()
            self._offer = self._ask()
            self._asked_after, self._asked_for = rounds, config
            self._asked_at, self._asked_in = now, self._moment()
            self._offer_until = now + OFFER_SECONDS
            self._rest_until = now + (time.thread_time() - started) / MAX_SHARE
        return self._offer

    def _age_s(self) -> float | None:
        """Seconds since the planner was asked; None while it would answer the same."""
        if len(self._runtime.tables) == 0 or self._asked_in == self._moment():
            return None
        return time.monotonic() - self._asked_at

    def _moment(self) -> Moment:
        runtime = self._runtime
        return (
            runtime.step,
            runtime.tables.num_changes,
            runtime.state.store.num_free_blocks(),
            runtime.relocator.num_in_flight_tokens,
        )

    def _ask(self) -> Offer:
        runtime, config = self._runtime, self._runtime.config
        preview = runtime.round_planner.preview(config)
        found, after = preview.round, None
        if not found.plans and found.shared_skipped_blocks and config.prefix_sharing != "copy":
            copying = structs.replace(config, prefix_sharing="copy")
            after = runtime.round_planner.preview_after(copying, {})
        return Offer(
            tuple(Part.of(runtime.tables[plan.request_id], plan) for plan in found.plans),
            preview.available_blocks,
            found.missing_blocks,
            found.shared_skipped_blocks,
            after.emptied_blocks + after.round.num_freed_blocks if after else 0,
            "copy" if after and after.round.num_moved_tokens else "index",
        )
