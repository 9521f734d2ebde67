"""Relocation: rounds, manual operations, and relocations in flight.

Independent of policies and of the engine. Invariants:
1. a request has at most one relocation in flight (I4)
2. destinations are in private, unhashed blocks
3. blocks dropped from a table are returned; the caller gives them back after all plans
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec
import numpy as np

from vtoken.base.errors import InvariantViolation
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.planning.gates import Pressure, first_closed
from vtoken.core.planning.planner import RelocationPlan
from vtoken.core.planning.round import Round
from vtoken.core.protocol.integrity import order_dependence
from vtoken.core.protocol.step import Retained, StepPlan
from vtoken.core.runtime.active_config import ActiveConfig
from vtoken.core.runtime.block_store import BlockStore
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.core.runtime.held_request import LastMoves
from vtoken.core.runtime.prices import Prices
from vtoken.core.runtime.relocation.in_flight import InFlight
from vtoken.core.runtime.relocation.operations import Operations
from vtoken.core.runtime.relocation.round_planner import RoundPlanner
from vtoken.core.runtime.requests import Requests

DEFERRED_EVENT_SECONDS = 5.0  # between two events of deferred rounds


@dataclass(eq=False)
class Relocator:
    """Plans, applies and tracks the relocations of one runtime."""

    _shape: EngineShape
    _store: BlockStore
    _requests: Requests
    _active: ActiveConfig
    _current: CurrentStep
    _planner: RoundPlanner
    _prices: Prices
    _operations: Operations

    def __post_init__(self) -> None:
        self._handed_over: list[InFlight] = []  # in the plan of the newest step
        self.planned: dict[str, InFlight] = {}
        geometry = self._shape.geometry
        self._marks = np.zeros(geometry.num_blocks * geometry.block_size, dtype=np.uint8)
        self._verify_credit = 0.0
        self._last_round_step = 0
        self._last_round_empty = False
        self._short_blocks = 0
        self._closed_gate: str | None = None  # defers this step's automatic round
        self._last_deferred_event = 0.0
        self.num_rounds = 0  # with at least one plan
        self._in_flight: dict[int, list[InFlight]] = {}

    def reclaim_excess(self, *, missing_blocks: int) -> list[int]:
        """Run a round before anybody gives tokens, if one may free blocks.

        `missing_blocks` and the result as in `plan_step`.
        """
        if self._last_round_empty or self._active.config.reclamation != "auto":
            return []
        if not len(self._planner.movable_rows()):
            return []
        batch_size = self._shape.geometry.num_blocks if missing_blocks > 0 else None
        return self._reclaim(batch_size=batch_size)[1]

    def plan_step(
        self, *, new_holes: bool, missing_blocks: int, short_blocks: int = 0
    ) -> list[int]:
        """Run pending operations, else an automatic round if the gates are open; returns the blocks
        that left a table.

        `missing_blocks`: how many more blocks than are free running requests need in this step. If
        any, a round runs regardless of F and B, because the alternative is a preemption, which
        recomputes an entire prompt. `short_blocks`: the shortage of the step; if any, the gates of
        pressure are open.
        """
        self._short_blocks = short_blocks
        if new_holes:
            self._last_round_empty = False
        if self._operations.list_pending():
            return self._run_operations()
        if not self._requests.tables.any_virtual:
            return []  # only the last block of a request can have free slots
        if missing_blocks > 0 and self._active.config.reclamation == "auto":
            return self._reclaim(batch_size=self._shape.geometry.num_blocks)[1]
        self._closed_gate = first_closed(self._active.config, self.pressure())
        return [] if self._closed_gate is not None else self._run_round()

    def forget_step(self) -> None:
        """Reset the plans for a new step."""
        self.planned.clear()
        self._handed_over = []
        self._closed_gate = None

    def note_held_back(self) -> None:
        """Count the closed gate: a round could have gained something in this step."""
        if self._closed_gate is not None:
            self._current.counters.reclamation.deferrals[self._closed_gate] += 1

    def hand_over(self, plan: StepPlan) -> None:
        """Write the step's copies into the worker's plan."""
        if not self.planned:
            return
        in_flight = [*self.planned.values()]
        plan.source_slots = np.concatenate([f.plan.source_slots for f in in_flight])
        plan.destination_slots = np.concatenate([f.plan.destination_slots for f in in_flight])
        self._check_one_pass(plan)
        self._in_flight[self._current.number] = in_flight
        self._handed_over = in_flight
        self.planned.clear()

    def _check_one_pass(self, plan: StepPlan) -> None:
        """Check that the copies are of requests that still hold their blocks, and in any order."""
        step = self._current.number
        for name in self.planned:
            if self._requests.in_flight_step(name) != step:
                self._current.violated(
                    InvariantViolation("I4", f"{name} has released the blocks of its plan")
                )
        if wrong := order_dependence(plan.source_slots, plan.destination_slots, self._marks):
            self._current.violated(InvariantViolation("I4", f"step {step} {wrong}"))

    def steps_in_flight(self, before: int) -> list[int]:
        """Steps before `before` whose copies are not reported yet."""
        return [step for step in self._in_flight if step < before]

    def finish_step(self, step: int, copy_us: int, fault: str | None = None) -> None:
        """Finish the copies of `step`; `fault`: why it is unknown whether they were executed."""
        for moving in self._in_flight.pop(step, []):
            self._record(moving, step, copy_us, fault)

    def drop(self, request_id: str) -> None:
        """Remove a request that releases its blocks from the step's plan; fail its operations."""
        planned = self.planned.pop(request_id, None)
        if planned is not None:
            self._transfer_gain(planned)
            if planned.operation_id is not None:
                self._operations.part_ended(planned.operation_id)
        for operation in self._operations.list_pending():
            if operation.request_id == request_id:
                self._operations.fail(operation, f"request {request_id} is no longer running")

    def settle(self) -> None:
        """Finish pending operations without moves: no request holds a block."""
        for operation in self._operations.list_pending():
            self._operations.start(operation)
            self._operations.finish(operation)

    def num_planned_copies(self, step: int) -> int:
        """Tokens that the plan of `step` copies; 0 after its report."""
        return sum(f.relocation.moved_tokens for f in self._in_flight.get(step, ()))

    def _transfer_gain(self, dropped: InFlight) -> None:
        """A group's gain is recorded on one of its plans; if that plan is dropped, another takes it
        over."""
        blocks = set(dropped.plan.shared_blocks)
        for target in self.planned.values():
            if not blocks.isdisjoint(target.plan.shared_blocks):
                target.relocation.freed_blocks += dropped.relocation.freed_blocks
                target.relocation.retaken_blocks += dropped.relocation.retaken_blocks
                return

    @property
    def in_flight_blocks(self) -> frozenset[int]:
        """Blocks that the copies of the newest step read or write."""
        return frozenset(chain.from_iterable(moving.blocks for moving in self._handed_over))

    @property
    def num_in_flight_tokens(self) -> int:
        return sum(f.relocation.moved_tokens for fs in self._in_flight.values() for f in fs)

    def pressure(self, *, ahead: int = 0) -> Pressure:
        """The gates' input in this step, or `ahead` steps later if nothing else changes."""
        pool = self._requests.tables.pool
        return Pressure(
            f=pool.fragmentation,
            free_blocks=self._store.num_free_blocks(),
            steps_since_round=self._current.number + ahead - self._last_round_step,
            last_round_empty=self._last_round_empty,
            count_low_utilization=pool.num_low_utilization,
            wanted_blocks=self._current.wanted_blocks,
            short_blocks=self._short_blocks,
            ask_worth=partial(self._planner.worth, self._active.config),
        )

    def _run_round(self) -> list[int]:
        """Run an automatic round. Waiting for reports does not make it an empty round."""
        started = time.perf_counter_ns()
        found, freed = self._reclaim()
        self._prices.plans.add((time.perf_counter_ns() - started) / 1000, len(found.plans))
        if found.missing_blocks:
            self._current.counters.reclamation.deferrals["headroom"] += 1
        elif not found.plans and self._waits_for_reports():
            self._current.counters.reclamation.deferrals["in_flight"] += 1
            self._last_round_empty = False
        return freed

    def _defer(self, missing: int, available: int) -> None:
        """Count a round, automatic or manual, that lacked `missing` fresh blocks beyond
        `available`; one event per `DEFERRED_EVENT_SECONDS`.
        """
        self._current.counters.reclamation.deferred += 1
        now = time.monotonic()
        if now - self._last_deferred_event < DEFERRED_EVENT_SECONDS:
            return
        self._last_deferred_event = now
        self._current.note(
            "deferred",
            f"deferred: {missing} more headroom blocks needed than the {available} available",
            {
                "reason": "headroom",
                "needed_blocks": missing + available,
                "available_blocks": available,
            },
        )

    def _waits_for_reports(self) -> bool:
        """Whether a request with excess blocks is skipped because of a relocation in flight."""
        rows = self._requests.tables.all_rows
        since = self._requests.due.in_flight[rows]
        waiting = rows[(since > 0) & (since < self._current.number)]
        return bool(self._planner.num_excess(waiting).any())

    def _reclaim(
        self,
        *,
        batch_size: int | None = None,
        request_ids: list[str] | None = None,
        operation_id: str | None = None,
    ) -> tuple[Round, list[int]]:
        """Plan and apply a round; returns it, and the blocks that left a table."""
        started = time.perf_counter_ns()
        self._last_round_step = self._current.number
        preview = self._planner.preview(
            self._active.config, request_ids=request_ids, batch_size=batch_size
        )
        found = preview.round
        plan_us = (time.perf_counter_ns() - started) // 1000
        self._current.counters.reclamation.plan_us += plan_us
        self._last_round_empty = not found.plans
        self.num_rounds += bool(found.plans)
        if found.missing_blocks:
            self._defer(found.missing_blocks, preview.available_blocks)
        self._current.counters.reclamation.shared_skipped_blocks += found.shared_skipped_blocks
        used = self._requests.tables.pool.num_used
        freed: list[int] = []
        for plan in found.plans:
            freed += self._apply(plan, plan_us // len(found.plans), operation_id)
        num_freed = used - self._requests.tables.pool.num_used
        if num_freed != found.num_freed_blocks:
            self._current.violated(
                InvariantViolation(
                    "I4",
                    f"a round promised to free {found.num_freed_blocks} blocks, freed {num_freed}",
                )
            )
        return found, freed

    def _apply(self, plan: RelocationPlan, plan_us: int, operation_id: str | None) -> list[int]:
        """Apply one plan of a round; returns the blocks that left the table."""
        size = self._shape.block_size
        table = self._requests.tables[plan.request_id]
        request = self._requests.held[plan.request_id]
        if earlier := self._requests.in_flight_step(plan.request_id):
            detail = f"{plan.request_id} has a relocation of step {earlier} in flight"
            self._current.violated(InvariantViolation("I4", detail))
        num_shed = plan.num_shed_blocks
        fresh = self._store.take(plan.num_fresh_blocks) if plan.num_fresh_blocks else []
        bound = plan.bind(fresh, size)
        destinations = sorted({*(bound.destination_slots // size).tolist()})
        self._current.check_private(self._store, destinations, "moved tokens")
        try:
            dropped = self._requests.tables.apply_moves(
                plan.request_id, bound.token_ids, bound.destination_slots, bound.blocks
            )
        except InvariantViolation as violation:  # nothing changed
            self._current.violated(violation)
            return fresh
        if len(dropped) - len(fresh) != num_shed or num_shed <= 0:
            self._current.violated(
                InvariantViolation(
                    "I4", f"{len(dropped)} blocks dropped, {len(fresh)} taken, {num_shed} promised"
                )
            )
        self._current.decisions.moved[table.row] = bound.token_ids, bound.destination_slots
        if self._samples():
            ids = table.live_ids()
            self._current.decisions.retained[table.row] = Retained(ids, table.slots_of(ids))
        blocks = table.block_ids()
        self._current.decisions.blocks[table.row] = blocks
        self._store.rebind(table.request_id, blocks.tolist())
        self._requests.due.in_flight[table.row] = self._current.number
        request.moved_tokens += plan.num_moved_tokens
        request.last_moves = request.last_moves or LastMoves()
        request.last_moves.moved(bound.token_ids, self._current.number)
        self.planned[plan.request_id] = InFlight.of(
            plan,
            bound,
            destinations,
            self._shape.geometry,
            holders=self._requests.tables.pool.holders,
            plan_us=plan_us,
            operation_id=operation_id,
        )
        return dropped

    def _samples(self) -> bool:
        """Whether to verify this relocation by content: an evenly spread share `verify_ratio`."""
        self._verify_credit += self._active.config.verify_ratio
        if self._verify_credit < 1.0 - 1e-9:
            return False
        self._verify_credit -= 1.0
        return True

    def _run_operations(self) -> list[int]:
        freed: list[int] = []
        for operation in self._operations.list_pending():
            if self._is_in_flight(operation.request_id):
                continue  # I4: runs once that relocation is reported
            self._operations.start(operation)
            ids = None if operation.request_id is None else [operation.request_id]
            found, dropped = self._reclaim(
                batch_size=operation.batch_size,
                request_ids=ids,
                operation_id=operation.id,
            )
            freed += dropped
            self._operations.planned(operation, found, self._shape.geometry.bytes_per_token)
            if not found.plans:
                self._operations.finish(operation)
            for plan in found.plans:
                if plan.request_id not in self.planned:
                    why = f"the plan for {plan.request_id} could not be applied, see the events"
                    self._operations.part_ended(operation.id, fault=why)
        return freed

    def _is_in_flight(self, request_id: str | None) -> bool:
        """Whether this request, or any request for None, has a relocation in flight."""
        if request_id is None:
            return bool(self._requests.due.in_flight[self._requests.tables.all_rows].any())
        return bool(self._requests.in_flight_step(request_id))

    def _record(self, moving: InFlight, step: int, copy_us: int, fault: str | None) -> None:
        moved = moving.relocation
        moved.copy_us = copy_us
        moving.count(self._current.counters.reclamation)
        if (
            self._requests.in_flight_step(moved.request_id) == step
        ):  # else the request was restarted
            self._requests.due.in_flight[self._requests.tables.rows[moved.request_id]] = 0
        self._current.note("relocation", moving.summary, msgspec.structs.asdict(moved))
        if moving.operation_id is not None:
            self._operations.part_ended(moving.operation_id, moved, fault)
