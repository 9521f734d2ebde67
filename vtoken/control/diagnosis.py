"""Fragmented or full? What limits admission now and what would help, from the planner itself.

Reads the runtime and changes nothing. `Outlook` says how many blocks are short.
- Fragmented: blocks are short, and compacting frees them.
- Full: blocks are short, and compacting does not free them.
- OK: no block is short.

Where requests give tokens under pressure, a cause becomes worse at once and better only when the
worse one has been gone for `HOLD_S`: giving ends a shortage within a step, and the next one follows
in the next. With a fixed budget the paper's words hold, too, while no block is short: the pool is
fragmented if its free blocks, less what a waiting request lacks, are at the low watermark and
compacting would free some; it is full if compacting would free none and no more blocks are free
than one round may take.

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
from collections.abc import Sequence
from typing import get_args

from msgspec import structs

from vtoken.control.advice import Situation, sentence
from vtoken.control.cached_preview import CachedPreview, TablePlan
from vtoken.control.facts import EngineFacts
from vtoken.control.outlook import Outlook
from vtoken.core.config.values import VTokenConfig
from vtoken.core.planning.gates import describe_gates, headroom_gate
from vtoken.core.runtime.runtime import Runtime
from vtoken.sentences import counted, sessions_text, when
from vtoken.wire import BlockCounts, CacheGroup, Cause, Fragmentation, MemoryPressure

HOLD_S = 2.0
CAUSES: tuple[Cause, ...] = get_args(Cause)  # the worse, the later
PREVIEW_TTL_S = 0.1
MAX_SHARE = 0.0005  # of the engine's time that planning previews may take


class Diagnosis:
    """Diagnoses the memory of one runtime, which `facts` describe further."""

    def __init__(self, runtime: Runtime, facts: EngineFacts) -> None:
        self._runtime = runtime
        self._facts = facts
        self._cause: Cause = "ok"
        self._seen = 0.0  # monotonic seconds at which `_cause` held last
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
        blocks: BlockCounts,
        outlook: Outlook,
        memory: MemoryPressure | None,
        groups: Sequence[CacheGroup] = (),
    ) -> Fragmentation:
        """The diagnosis of `blocks` now. `outlook`: that of the configuration in force; `memory`:
        the pressure now; `groups`: those of layers, none if there is one.
        """
        runtime, config = self._runtime, self._runtime.config
        pool, free = runtime.tables.pool, blocks.free
        preview = self._current_preview()
        gain = preview.gain(runtime)
        age_s = self._age_s()
        if age_s is not None and not gain.likely and not runtime.round_planner.movable():
            preview, age_s = self._empty_preview(), None
        pressure = runtime.relocator.pressure(
            ahead=1, count_low_utilization=lambda: blocks.low_utilization
        )
        gates = describe_gates(config, pressure)
        gates.append(
            headroom_gate(preview.available_blocks, preview.missing_blocks, gains=gain.likely)
        )
        short = outlook.standing
        cause: Cause = "ok"
        if short.blocks:
            cause = "fragmented" if gain.freed_blocks >= short.blocks else "full"
        elif memory is None and gain.likely:
            low = free - runtime.state.wanted_blocks <= config.low_watermark_blocks
            cause = "fragmented" if low else "ok"
        elif memory is None and free <= config.headroom_blocks:
            cause = "full"
        now, ended_s = time.monotonic(), 0.0
        if memory is not None:
            cause, ended_s = self._held(cause, now)
        moved_bytes = gain.moved_tokens * runtime.geometry.bytes_per_token
        demand, facts = runtime.admission.demand, self._facts
        situation = Situation(
            cause=cause,
            config=config,
            pressure=pressure,
            gates=gates,
            num_requests=len(runtime.tables),
            may_evict=runtime.state.may_evict,
            num_waiting=facts.waiting,
            short=short,
            withheld_blocks=0 if demand is None else demand.withheld_blocks,
            total_blocks=blocks.total,
            used_slots=pool.num_used * runtime.geometry.block_size,
            live_tokens=pool.num_live,
            gain=gain,
            moved_bytes=moved_bytes,
            preview=preview,
            planned_s=age_s,
            memory=memory,
            short_until_s=ended_s,
            oldest_wait_s=outlook.oldest_wait_s,
            patience_s=0.0 if demand is None else outlook.patience_left_s(demand),
            reread_tokens=0 if demand is None else self._reread_tokens(demand.request_id),
            remedy=self._remedy(outlook),
            paused=self._paused(),
            sessions=sessions_text(*runtime.state.sessions(), blocks.total),
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

    def _held(self, cause: Cause, now: float) -> tuple[Cause, float]:
        """The worst cause of the last `HOLD_S`, and how many seconds ago it held last."""
        runtime, seen = self._runtime, now
        idle = len(runtime.tables) == 0
        gave_s = runtime.state.given.since_s()
        if cause == "ok" and gave_s < HOLD_S:
            cause, seen = "full", now - gave_s  # it was short until others gave
        worse = CAUSES.index(cause) - CAUSES.index(self._cause)
        if worse == 0:
            self._seen = max(self._seen, seen)
        elif worse > 0 or now - self._seen >= HOLD_S or idle:
            self._cause, self._seen = cause, seen
        return self._cause, now - self._seen

    def _reread_tokens(self, request_id: str) -> int:
        """The tokens that a preempted request computes again, which is all but its newest; 0 if
        it was not preempted.
        """
        preempted = self._runtime.state.preempted.get(request_id)
        return self._runtime.admission.num_prompt_tokens(request_id) - 1 if preempted else 0

    def _remedy(self, outlook: Outlook) -> str:
        """How many blocks more requests would give: if reclamation were resumed, or at a lower
        floor while they cannot give enough; "" if none.
        """
        config = self._runtime.config
        if outlook.waits_for == "resume":
            resumed = structs.replace(config, reclamation="auto")
            blocks = Outlook(self._runtime, resumed).givable_blocks
            return f"resumed, they could give {counted(blocks, 'block')}" if blocks else ""
        if outlook.waits_for != "end":
            return ""
        name = "budget_ratio" if config.budget_ratio else "budget_tokens"
        lower = getattr(config, name) * 2 / 3
        lower = round(lower, 2) if config.budget_ratio else max(1, int(lower))
        changed = structs.replace(config, **{name: lower})
        more = Outlook(self._runtime, changed).givable_blocks - outlook.givable_blocks
        return f"{name}={lower} gives {counted(more, 'block')} more" if more > 0 else ""

    def _paused(self) -> str:
        """Who stopped reclamation and when; "" while it is auto."""
        mode, facts = self._runtime.config.reclamation, self._facts
        if mode == "auto":
            return ""
        since = facts.reclamation_since_ts
        by = f" by {facts.reclamation_by}" if facts.reclamation_by else " since the start"
        return f"{mode}{by}" + ("" if since is None else f" at {when(since)}")

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
