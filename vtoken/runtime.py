"""The runtime: token tables, policy, planner and recycling composed into one step protocol.

Knows no engine: whoever owns the blocks implements `BlockStore` and calls, once a step,

    begin_step(ready)       before allocation: evict, give all-dead blocks back, relocate
    required_extent(id, n)  during it: how many places the request needs for n new tokens
    commit_step(grown)      after it: register the new tokens, return the worker's plan
    finish_step(report)     what the worker reports of a step

and `release(id)` whenever a request lets go of its blocks. Invariants:
1. the step's victims are invisible from that step's attention on, whatever reclamation does
2. a block given back in begin_step is in nobody's table; none becomes a destination in the same
   pass (they are collected and returned after all plans)
3. destinations and recycled places lie in blocks that are private and unhashed
4. a request has at most one relocation that is not reported (I4)
5. what `release` sees between begin_step and commit_step leaves the step's plan with the request
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.events import EventLog
from vtoken.operations import Operations
from vtoken.planner import Layout, RelocationPlan, num_excess_blocks
from vtoken.policies import View
from vtoken.reclaim import (
    MIN_LOW_UTILIZATION_BLOCKS,
    Pressure,
    Round,
    gates_open,
    plan_round,
)
from vtoken.requests import Counters, RequestState
from vtoken.step import RequestStep, StepPlan, WorkerReport
from vtoken.table import Ids, TokenTable
from vtoken.tables import TokenTables
from vtoken.wire import Geometry, Relocation

DEFERRAL_EVENT_SECONDS = 5.0


class BlockStore(Protocol):
    """Who owns the physical blocks."""

    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now."""

    def is_writable(self, block: int) -> bool:
        """Whether the sole holder may write it: not shared, no prefix hash."""

    def is_shared(self, block: int) -> bool:
        """Whether two requests or more hold it."""

    def take(self, num_blocks: int) -> list[int]:
        """Allocate fresh private blocks; the caller asked `num_free_blocks` first."""

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        """`blocks` is the request's block table from now on; blocks that left are not freed yet."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference fewer for each of `blocks`; unreferenced ones become free."""


@dataclass(slots=True)
class GrownRequest:
    """A scheduled request after allocation: its whole block table and its tokens so far."""

    request_id: str
    block_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    seed: int


@dataclass(slots=True)
class InFlight:
    """A relocation whose copy has been handed to the worker."""

    relocation: Relocation
    operation_id: str | None


class Runtime:
    """Token-level virtualization of one block pool."""

    def __init__(
        self,
        geometry: Geometry,
        store: BlockStore,
        config: VTokenConfig,
        *,
        verify_ratio: float = 0.0,
        strict: bool = True,
        check_every_step: bool = False,
    ) -> None:
        self.geometry = geometry
        self.store = store
        self.config = config
        self.verify_ratio = verify_ratio
        self.strict = strict
        self.check_every_step = check_every_step
        self.tables = TokenTables(geometry.num_blocks, geometry.block_size)
        self.states: dict[str, RequestState] = {}
        self.counters = Counters()
        self.events = EventLog()
        self.operations = Operations()
        self.step = 0
        self.in_flight_blocks: frozenset[int] = frozenset()
        self._last_round_step = 0
        self._last_round_empty = False
        self._last_deferral = 0.0
        self._in_flight: dict[int, list[InFlight]] = {}
        self._planned: dict[str, tuple[RelocationPlan, InFlight]] = {}
        self._verify_credit = 0.0

    # ------------------------------------------------------------ step protocol

    def begin_step(self, ready: Iterable[str]) -> None:
        """Decide what dies and what moves before this step's allocation.

        `ready`: requests whose prompt is computed and that will append one token next.
        """
        self.step += 1
        self._planned.clear()
        self.in_flight_blocks = frozenset()
        freed: list[int] = []
        if self.config.evicts:
            self._evict_due(ready, freed)
        if self.operations.pending:
            self._run_operations(freed)
        elif gates_open(self.config, self._pressure()) and (
            self.tables.pool.num_low_utilization() >= MIN_LOW_UTILIZATION_BLOCKS
        ):
            self._reclaim(freed)
        if freed:
            self.store.give_back(freed)
        self._pick_holes()

    def required_extent(self, request_id: str, num_new: int) -> int | None:
        """Places that must exist for `num_new` more tokens; None when the layout is positional."""
        table = self.tables.get(request_id)
        if table is None or not table.virtual:
            return None
        state = self.states[request_id]
        if num_new == 1 and state.hole is not None:
            return table.extent
        return table.append_start(state.readonly) + num_new

    def commit_step(self, grown: Iterable[GrownRequest]) -> StepPlan:
        """Register the tokens of the scheduled requests; the plan that the worker must execute."""
        plan = StepPlan(self.step)
        plan.probing = probing = "attention" in self.config.policy.needs
        if probing and self.step % self.config.probe_every_steps == 0:
            plan.probe_layers = self.config.probe_layers or (self.geometry.num_layers // 2,)
        want = []
        for request in grown:
            table = self._grow(request)
            if probing and self._is_due(table):
                want.append(request.request_id)
        plan.want_scores = tuple(want)
        for request_id, state in self.states.items():
            if state.pending is not None:
                table = self.tables[request_id]
                state.pending.num_live = table.num_live
                state.pending.dense = table.dense
                plan.requests[request_id] = state.pending
                state.pending = None
        self._hand_over(plan)
        self.counters.commits_checked += 1
        if self.check_every_step:
            self.check()
        return plan

    def finish_step(self, report: WorkerReport | None, step: int) -> None:
        """The worker is done with `step`; `report` is None when it had nothing to say."""
        copy_us = report.copy_us if report is not None else 0
        self.counters.copy_us += copy_us
        for flight in self._in_flight.pop(step, []):
            self._record_relocation(flight, copy_us)
        if report is None:
            return
        if report.violation is not None:
            self.violated(InvariantViolation("I1", report.violation))
        for request_id, scores in report.scores.items():
            state = self.states.get(request_id)
            if state is not None and state.admitted_step <= report.step:
                state.scores = scores

    def release(self, request_id: str, *, preempted: bool = False) -> None:
        """The request lets go of its blocks: finished, aborted or preempted."""
        table = self.tables.get(request_id)
        if table is None:
            return
        num_dead = table.num_dead
        planned = self._planned.pop(request_id, None)
        if planned is not None and planned[1].operation_id is not None:
            operation = self.operations.drop_part(planned[1].operation_id)
            if operation is not None:
                self.operations.finish(operation)
        self.tables.release(request_id)
        del self.states[request_id]
        per_request = self.counters.preempted_per_request
        if preempted:
            self.counters.preemptions += 1
            per_request[request_id] = per_request.get(request_id, 0) + 1
            self.events.add(
                self.step,
                "preemption",
                f"{request_id} preempted; {num_dead} dead tokens will be recomputed and seen again",
                {"request_id": request_id, "dead_tokens_restored": num_dead},
            )
        else:
            per_request.pop(request_id, None)
            self.counters.finished_requests += 1

    # ------------------------------------------------------------ eviction

    def _is_due(self, table: TokenTable) -> bool:
        return table.num_live > self.config.budget_tokens + self.config.interval_tokens

    def pick_victims(self, table: TokenTable, config: VTokenConfig) -> Ids | None:
        """The ids that `config` would evict from `table` now; None when nothing is due."""
        if not config.evicts or (table.num_live <= config.budget_tokens + config.interval_tokens):
            return None
        state = self.states[table.request_id]
        ids = table.live_ids()
        scores = None
        if "attention" in config.policy.needs:
            if state.scores is None:
                return None  # nothing has been probed yet: wait rather than guess
            # Tokens newer than the last report have not been seen: they count as heavy.
            known = np.full(table.num_tokens, np.inf, dtype=np.float32)
            known[: len(state.scores)] = state.scores[: table.num_tokens]
            scores = known[ids]
        view = View(
            token_ids=ids,
            num_tokens=table.num_tokens,
            num_prompt_tokens=state.num_prompt_tokens,
            budget_tokens=config.budget_tokens,
            seed=state.seed,
            scores=scores,
        )
        victims = config.policy.select_victims(view)
        if len(victims) != view.num_victims or victims[-1] == table.num_tokens - 1:
            raise InvariantViolation(
                "policy",
                f"{config.policy.name} returned {len(victims)} victims of {view.num_victims}, "
                f"the newest {victims[-1:]} of {table.num_tokens} tokens",
            )
        return victims

    def _evict_due(self, ready: Iterable[str], freed: list[int]) -> None:
        num_requests = num_tokens = num_blocks = 0
        for request_id in ready:
            table = self.tables.get(request_id)
            if table is None or not self._is_due(table):
                continue
            victims = self.pick_victims(table, self.config)
            if victims is None:
                continue
            state = self.states[request_id]
            if not table.virtual:
                state.readonly = frozenset(
                    block for block in table.blocks if not self.store.is_writable(block)
                )
            pending = self._pending(state, table)
            table.evict(victims)
            pending.evicted = victims
            num_requests += 1
            num_tokens += len(victims)
            num_blocks += self._drop_dead_blocks(table, pending, freed)
        if num_tokens == 0:
            return
        self._last_round_empty = False  # there are new holes to look at
        self.counters.evicted_tokens += num_tokens
        self.counters.reclaimed_blocks += num_blocks
        self.events.add(
            self.step,
            "eviction",
            f"{self.config.policy.name} evicted {num_tokens} tokens of {num_requests} requests",
            {"requests": num_requests, "tokens": num_tokens, "policy": self.config.policy.name},
        )
        if num_blocks:
            self.events.add(
                self.step,
                "reclaimed",
                f"{num_blocks} all-dead blocks returned",
                {"blocks": num_blocks, "reason": "all dead"},
            )

    def _drop_dead_blocks(self, table: TokenTable, pending: RequestStep, freed: list[int]) -> int:
        """Let go of blocks without a live token; how many of them nobody holds any more."""
        dead = table.dead_blocks(pending.evicted)
        if not dead:
            return 0
        keep = [block for block in table.blocks if block not in dead]
        dropped = table.apply_moves(pending.evicted[:0], pending.evicted[:0], keep)
        self._rebound(table, pending)
        freed.extend(dropped)
        return int(np.count_nonzero(self.tables.pool.holders[dropped] == 0))

    # ------------------------------------------------------------ relocation

    def _pressure(self) -> Pressure:
        return Pressure(
            f=self.tables.pool.fragmentation,
            free_blocks=self.store.num_free_blocks(),
            steps_since_round=self.step - self._last_round_step,
            last_round_empty=self._last_round_empty,
        )

    def layouts(self, request_ids: Iterable[str] | None = None) -> Iterator[Layout]:
        """Snapshots, made when taken, of the virtual requests that hold more blocks than they need.

        The most empty slots first; requests with a relocation in flight are left out (I4).
        """
        size = self.geometry.block_size
        tables = [
            table
            for table in map(
                self.tables.__getitem__, self.tables_ids() if request_ids is None else request_ids
            )
            if table.virtual
            and num_excess_blocks(len(table.blocks), table.num_live, size) > 0
            and not self.states[table.request_id].in_flight_step
        ]
        tables.sort(key=lambda table: table.num_live - len(table.blocks) * size)
        return map(self.layout_of, tables)

    def layout_of(self, table: TokenTable, dead: Ids | None = None) -> Layout:
        """The planner's snapshot of one table; `dead`: ids to be counted as dead already."""
        grid = table.grid()
        if dead is not None and len(dead):
            grid[np.isin(grid, dead)] = -1
        store = self.store
        return Layout(
            table.request_id,
            tuple(table.blocks),
            grid,
            movable=np.array([not store.is_shared(b) for b in table.blocks], dtype=np.bool_),
            writable=np.array([store.is_writable(b) for b in table.blocks], dtype=np.bool_),
        )

    def tables_ids(self) -> list[str]:
        return [table.request_id for table in self.tables]

    def headroom(self, config: VTokenConfig) -> int:
        return min(config.headroom_blocks, self.store.num_free_blocks())

    def _reclaim(
        self,
        freed: list[int],
        *,
        batch_size: int | None = None,
        request_ids: list[str] | None = None,
        operation_id: str | None = None,
    ) -> Round:
        started = time.perf_counter_ns()
        self._last_round_step = self.step
        available = self.headroom(self.config)
        found = plan_round(
            self.layouts(request_ids),
            self.config,
            batch_size=batch_size or self.config.batch_size,
            headroom_blocks=available,
        )
        plan_us = (time.perf_counter_ns() - started) // 1000
        self.counters.plan_us += plan_us
        self._last_round_empty = not found.plans
        if found.missing_blocks:
            self._note_deferral(found.missing_blocks, available)
        for plan in found.plans:
            self._apply(plan, freed, plan_us // len(found.plans), operation_id)
        return found

    def _note_deferral(self, missing: int, available: int) -> None:
        self.counters.deferred_rounds += 1
        now = time.monotonic()
        if now - self._last_deferral < DEFERRAL_EVENT_SECONDS:
            return
        self._last_deferral = now
        self.events.add(
            self.step,
            "deferred",
            f"deferred: {missing} more headroom blocks needed than the {available} available",
            {
                "reason": "headroom",
                "needed_blocks": missing + available,
                "available_blocks": available,
            },
        )

    def _apply(
        self, plan: RelocationPlan, freed: list[int], plan_us: int, operation_id: str | None
    ) -> None:
        table = self.tables[plan.request_id]
        state = self.states[plan.request_id]
        num_freed = plan.num_freed_blocks
        fresh = self.store.take(plan.num_fresh_blocks) if plan.num_fresh_blocks else []
        bound = plan.bind(fresh, self.geometry.block_size)
        destinations = np.unique(bound.destination_slots // self.geometry.block_size).tolist()
        for block in destinations:
            if not self.store.is_writable(block):
                self.violated(InvariantViolation("I4", f"destination block {block} is not private"))
        pending = self._pending(state, table)
        dropped = table.apply_moves(bound.token_ids, bound.destination_slots, bound.blocks)
        if len(dropped) - len(fresh) != num_freed or num_freed <= 0:
            self.violated(
                InvariantViolation(
                    "I4", f"{len(dropped)} blocks left, {len(fresh)} taken, {num_freed} promised"
                )
            )
        pending.moved_ids, pending.moved_slots = bound.token_ids, bound.destination_slots
        self._rebound(table, pending)
        freed.extend(dropped)
        state.in_flight_step = self.step
        state.moved_tokens += plan.num_moved_tokens
        relocation = Relocation(
            request_id=plan.request_id,
            moved_tokens=plan.num_moved_tokens,
            moved_bytes=plan.num_moved_tokens * self.geometry.bytes_per_token,
            source_blocks=list(plan.source_blocks),
            destination_blocks=destinations,
            freed_blocks=num_freed,
            reason="manual" if operation_id else "auto",
            planner=plan.planner,
            plan_us=plan_us,
        )
        self._planned[plan.request_id] = (bound, InFlight(relocation, operation_id))

    def _run_operations(self, freed: list[int]) -> None:
        for operation in self.operations.start_pending():
            ids = None if operation.request_id is None else [operation.request_id]
            if ids is not None and ids[0] not in self.tables:
                self.operations.fail(operation, f"request {ids[0]} is no longer running")
                continue
            found = self._reclaim(
                freed,
                batch_size=operation.batch_size,
                request_ids=ids,
                operation_id=operation.id,
            )
            self.operations.planned(operation, found, self.geometry.bytes_per_token)
            if not found.plans:
                self.operations.finish(operation)

    def _record_relocation(self, flight: InFlight, copy_us: int) -> None:
        moved = flight.relocation
        moved.copy_us = copy_us
        self.counters.relocations += 1
        self.counters.moved_tokens += moved.moved_tokens
        self.counters.reclaimed_blocks += moved.freed_blocks
        state = self.states.get(moved.request_id)
        if state is not None:
            state.in_flight_step = 0
        self.events.add(
            self.step,
            "relocation",
            f"moved {moved.moved_tokens} tokens of {moved.request_id}, "
            f"freed {moved.freed_blocks} blocks ({moved.planner}, {moved.reason})",
            msgspec.to_builtins(moved),
        )
        if flight.operation_id is not None:
            operation = self.operations.part_done(flight.operation_id, moved)
            if operation is not None:
                self.operations.finish(operation)

    # ------------------------------------------------------------ recycling and growth

    def _pick_holes(self) -> None:
        recycling = self.config.recycle and self.config.reclamation != "off"
        for request_id, state in self.states.items():
            state.hole = None
            if not recycling:
                continue
            table = self.tables[request_id]
            if table.virtual and not table.dense:
                state.hole = table.first_hole(state.readonly)

    def _grow(self, request: GrownRequest) -> TokenTable:
        request_id = request.request_id
        state = self.states.get(request_id)
        if state is None:
            state = self.states[request_id] = RequestState(
                request_id, request.num_prompt_tokens, request.seed, self.step
            )
        table = self.tables.get(request_id)
        if table is None or not table.virtual:
            self.tables.sync_new_tokens(request_id, request.block_ids, request.num_tokens)
            return self.tables[request_id]
        num_new = request.num_tokens - table.num_tokens
        hole = state.hole if num_new == 1 else None
        pending = self._pending(state, table)
        if hole is not None:
            state.recycled_slots += 1
            self.counters.recycled_slots += 1
        start = table.append_start(state.readonly) if hole is None else hole
        pending.new_slots = self.tables.sync_new_tokens(
            request_id, request.block_ids, request.num_tokens, start
        )
        size = self.geometry.block_size
        for block in {slot // size for slot in pending.new_slots.tolist()}:
            if not self.store.is_writable(block):
                self.violated(InvariantViolation("I4", f"block {block} is written, not private"))
        return table

    # ------------------------------------------------------------ plan assembly

    def _pending(self, state: RequestState, table: TokenTable) -> RequestStep:
        if state.pending is None:
            state.pending = RequestStep(num_tokens=table.num_tokens)
        return state.pending

    def _rebound(self, table: TokenTable, pending: RequestStep) -> None:
        pending.blocks = list(table.blocks)
        self.store.rebind(table.request_id, table.blocks)

    def _hand_over(self, plan: StepPlan) -> None:
        if not self._planned:
            return
        bounds = [bound for bound, _ in self._planned.values()]
        flights = [flight for _, flight in self._planned.values()]
        plan.source_slots = np.concatenate([b.source_slots for b in bounds])
        plan.destination_slots = np.concatenate([b.destination_slots for b in bounds])
        self._in_flight[self.step] = flights
        self.in_flight_blocks = frozenset(
            block
            for flight in flights
            for block in (*flight.relocation.source_blocks, *flight.relocation.destination_blocks)
        )
        self._verify_credit += self.verify_ratio
        if self._verify_credit >= 1.0:
            self._verify_credit -= 1.0
            plan.verify = True
        self._planned.clear()

    @property
    def num_in_flight_tokens(self) -> int:
        return sum(f.relocation.moved_tokens for fs in self._in_flight.values() for f in fs)

    # ------------------------------------------------------------ trust

    def violated(self, violation: InvariantViolation) -> None:
        """An invariant broke: count it, tell it, and in strict mode stop before a wrong token."""
        self.counters.violations += 1
        self.events.add(
            self.step,
            "violation",
            str(violation),
            {"invariant": violation.invariant, "detail": violation.detail},
        )
        if self.strict:
            raise violation

    def check(self) -> None:
        """All invariants, recomputed from nothing; raises InvariantViolation."""
        self.tables.check()
        if set(self.states) != {table.request_id for table in self.tables}:
            raise InvariantViolation("I4", "a request has a table but no state, or the reverse")
