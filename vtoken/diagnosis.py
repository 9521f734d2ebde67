"""Fragmented or full? What limits admission now and what would help, from the planner itself.

Reads the runtime, changes nothing. Fragmented: free blocks are at the low watermark, and compacting
would free some. Full: it would not, and no more blocks are free than one round may take.

The offer ("compacting now would free ...") is what a manual trigger would do at this moment: one
round of the real planner within B and the headroom. It is recomputed at most every `OFFER_SECONDS`,
and seldom enough to take 1% of the time at most.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from vtoken.reclaim import plan_round
from vtoken.runtime import Runtime
from vtoken.wire import Cause, Fragmentation

OFFER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Offer:
    """What one round would do now."""

    freed_blocks: int = 0
    moved_tokens: int = 0


class Diagnosis:
    """Explains one runtime's memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._offer = Offer()
        self._offer_until = 0.0

    def fragmentation(self) -> Fragmentation:
        runtime = self._runtime
        config = runtime.config
        f = runtime.tables.pool.fragmentation
        free = runtime.store.num_free_blocks()
        offer = self._current_offer(free)
        cause: Cause = "ok"
        if free <= config.low_watermark_blocks and offer.freed_blocks:
            cause = "fragmented"
        elif free <= config.headroom_blocks:
            cause = "full"
        moved_bytes = offer.moved_tokens * runtime.geometry.bytes_per_token
        return Fragmentation(
            f=f,
            theta_f=config.theta_f,
            cause=cause,
            sentence=self._sentence(cause, free, offer, moved_bytes),
            reclaimable_blocks=offer.freed_blocks,
            reclaim_moved_tokens=offer.moved_tokens,
            reclaim_moved_bytes=moved_bytes,
            low_watermark_blocks=config.low_watermark_blocks,
        )

    def _current_offer(self, free: int) -> Offer:
        now = time.monotonic()
        if len(self._runtime.tables) == 0:
            self._offer = Offer()
        elif now >= self._offer_until:
            runtime = self._runtime
            found = plan_round(
                runtime.relocator.layouts(),
                runtime.config,
                holders=runtime.tables.pool.holders,
                batch_size=runtime.config.batch_size,
                headroom_blocks=min(free, runtime.config.headroom_blocks),
            )
            self._offer = Offer(found.num_freed_blocks, found.num_moved_tokens)
            done = time.monotonic()
            self._offer_until = done + max(OFFER_SECONDS, 100 * (done - now))
        return self._offer

    def _sentence(self, cause: Cause, free: int, offer: Offer, moved_bytes: int) -> str:
        runtime = self._runtime
        pool = runtime.tables.pool
        if len(runtime.tables) == 0:
            return "Idle: no request is running; the whole pool is free."
        slots = pool.num_used * runtime.geometry.block_size
        holes = f"{slots - pool.num_live:,} of {slots:,} held slots carry no live token"
        megabytes = f"{moved_bytes / 1e6:.1f} MB moved"
        gain = f"compacting now would free {offer.freed_blocks:,} blocks ({megabytes})"
        if cause == "full":
            return (
                f"Full: {holes}; compacting frees nothing, a smaller budget or fewer requests do."
            )
        if cause == "fragmented":
            waits = "" if pool.fragmentation > runtime.config.theta_f else "; F is below theta_F"
            return f"Fragmented: {holes}; {gain}{waits}."
        return f"OK: {free:,} blocks free; {holes}" + (f"; {gain}." if offer.freed_blocks else ".")
