"""Fragmented or full? What limits admission now and what would help, from the planner itself.

Reads the runtime and changes nothing. The pool is *short* when its free blocks, less what a waiting
request lacks, are at the low watermark, or when a waiting request lacks any block.
- Fragmented: the pool is short, and compacting would free blocks.
- Full: compacting would free none, and either no more blocks are free than one round may take, or a
  request waits for blocks.
- OK: neither. The sentence says what compacting would free nevertheless.

"Compacting now would free ..." is the effect of a manual trigger at this moment: one round of the
real planner within B and the headroom. This preview is cached. It is planned again after every
change of the configuration, and after a round or `PREVIEW_TTL_S`, as long as planning takes at most
`MAX_SHARE` of the time: a plan of 3 ms is kept for 6 s. With a cached preview
1. the numbers are a lower bound of what a round would still free. `likely` says whether a round
   would probably free anything
2. the sentence states that compacting frees nothing, and why, while the state has not changed since
   the plan, or while no movable request holds more blocks than it needs. Checking the latter reads
   every request once and needs no plan. Otherwise the sentence gives the plan's age
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import structs

from vtoken.control.advice import Situation, sentence
from vtoken.control.cached_preview import CachedPreview, TablePlan
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import describe_gates, headroom_gate
from vtoken.core.runtime.runtime import Runtime
from vtoken.wire import CacheGroup, Cause, Fragmentation, MemoryPressure

PREVIEW_TTL_S = 0.1
MAX_SHARE = 0.0005  # of the engine's time that planning previews may take


class Diagnosis:
    """Diagnoses one runtime's memory; `count_waiting` returns the number of waiting requests."""

    def __init__(self, runtime: Runtime, count_waiting: Callable[[], int]) -> None:
        self._runtime = runtime
        self._count_waiting = count_waiting
        self._preview = CachedPreview()
        self._expires = 0.0  # a round ends it earlier
        self._backoff_until = 0.0  # no new plan before, unless the configuration changes
        # Of the cached preview: rounds before it, when, in which state, for which configuration.
        self._planned_after = 0
        self._planned_at = 0.0
        self._planned_in: tuple[int, ...] = ()
        self._planned_for: VTokenConfig | None = None

    def fragmentation(
        self,
        free: int,
        num_low: int,
        memory: MemoryPressure | None,
        groups: Sequence[CacheGroup] = (),
    ) -> Fragmentation:
        """The diagnosis now. `free`: free blocks; `num_low`: used blocks at most half live;
        `memory`: the pressure now; `groups`: those of layers, none if there is one.
        """
        runtime, config = self._runtime, self._runtime.config
        pool = runtime.tables.pool
        preview = self._current_preview()
        gain = preview.gain(runtime)
        age_s = self._age_s()
        if age_s is not None and not gain.likely and not runtime.round_planner.movable():
            preview, age_s = self._empty_preview(), None
        pressure = runtime.relocator.pressure(ahead=1, count_low_utilization=lambda: num_low)
        gates = describe_gates(config, pressure)
        gates.append(
            headroom_gate(preview.available_blocks, preview.missing_blocks, gains=gain.likely)
        )
        demand = runtime.admission.demand if self._count_waiting() else None
        lacking = 0 if demand is None else demand.missing_blocks
        short = free - runtime.state.wanted_blocks <= config.low_watermark_blocks or lacking > 0
        cause: Cause = "ok"
        if short and gain.likely:
            cause = "fragmented"
        elif not gain.likely and (free <= config.headroom_blocks or lacking > 0):
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
            used_slots=pool.num_used * runtime.geometry.block_size,
            live_tokens=pool.num_live,
            gain=gain,
            moved_bytes=moved_bytes,
            preview=preview,
            planned_s=age_s,
            memory=memory,
            waits_for_end=demand is not None and not demand.satisfiable,
            groups=groups,
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

    def _empty_preview(self) -> CachedPreview:
        """A round that finds nothing to move."""
        runtime = self._runtime
        return CachedPreview(available_blocks=runtime.round_planner.headroom(runtime.config))

    def _current_preview(self) -> CachedPreview:
        runtime = self._runtime
        if len(runtime.tables) == 0:
            return self._empty_preview()
        rounds, config = runtime.relocator.num_rounds, runtime.config
        now = time.monotonic()
        due = now >= self._expires or rounds != self._planned_after
        if config is not self._planned_for or (due and now >= self._backoff_until):
            started = time.thread_time()
            self._preview = self._plan()
            self._planned_after, self._planned_for = rounds, config
            self._planned_at, self._planned_in = now, self._runtime.version
            self._expires = now + PREVIEW_TTL_S
            self._backoff_until = now + (time.thread_time() - started) / MAX_SHARE
        return self._preview

    def _age_s(self) -> float | None:
        """The cached preview's age in seconds; None while a new one would equal it."""
        if len(self._runtime.tables) == 0 or self._planned_in == self._runtime.version:
            return None
        return time.monotonic() - self._planned_at

    def _plan(self) -> CachedPreview:
        runtime, config = self._runtime, self._runtime.config
        preview = runtime.round_planner.preview(config)
        found, after = preview.round, None
        if not found.plans and found.shared_skipped_blocks and config.prefix_sharing != "copy":
            copying = structs.replace(config, prefix_sharing="copy")
            after = runtime.round_planner.preview_after(copying, {})
        tables = [runtime.tables[plan.request_id] for plan in found.plans]
        return CachedPreview(
            tuple(
                TablePlan(table, plan, table.num_tokens, table.num_blocks)
                for table, plan in zip(tables, found.plans, strict=True)
            ),
            preview.available_blocks,
            found.missing_blocks,
            found.shared_skipped_blocks,
            after.emptied_blocks + after.round.num_freed_blocks if after else 0,
            "copy" if after and after.round.num_moved_tokens else "index",
        )
