"""Relocation: rounds, manual operations, and what is in flight to the worker.

Knows the ledger and the pure planner; knows nothing of policies or of the engine. Invariants:
1. a request has at most one relocation that is not reported (I4)
2. destinations lie in blocks that are private and unhashed
3. blocks that leave a table join `freed`; whoever asked returns them after all plans
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from vtoken.config import VTokenConfig
from vtoken.errors import InvariantViolation
from vtoken.flight import InFlight
from vtoken.gates import DEFERRALS, Pressure, first_closed
from vtoken.integrity import order_dependence
from vtoken.ledger import Ledger
from vtoken.operations import Operations
from vtoken.payback import LastMoves
from vtoken.planner import Layout, RelocationPlan, num_excess_blocks
from vtoken.reclaim import Round, plan_round
from vtoken.step import Retained, StepPlan
from vtoken.table import Ids, TokenTable
from vtoken.wire import Relocation

DEFERRAL_EVENT_SECONDS = 5.0
HEADROOM, IN_FLIGHT = map(DEFERRALS.index, ("headroom", "in_flight"))


class Relocator:
    """Plans, applies and follows the relocations of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.operations = Operations()
        self.in_flight_blocks: frozenset[int] = frozenset()
        self.planned: dict[str, tuple[RelocationPlan, InFlight]] = {}
        self._verify_credit = 0.0
        self._last_round_step = 0
        self._last_round_empty = False
        self._last_deferral = 0.0
        self._closed_gate: int | None = None  # what holds the automatic round of this step back
        self.num_rounds = 0  # that planned something
        self._in_flight: dict[int, list[InFlight]] = {}

    def plan_step(self, freed: list[int], *, new_holes: bool, missing_blocks: int = 0) -> None:
        """Run pending operations, else an automatic round if the gates are open.

        `missing_blocks`: how many more blocks than are free this step's prompt chunks will take.
        While some are missing, a round is due whatever F is, and B does not bound it: the
        alternative is a preemption, which computes a whole prompt again.
        """
        ledger = self._ledger
        self.planned.clear()
        self.in_flight_blocks = frozenset()
        self._closed_gate = None
        if new_holes:
            self._last_round_empty = False
        if self.operations.pending:
            self._run_operations(freed)
        elif missing_blocks > 0 and ledger.config.reclamation == "auto":
            self._reclaim(freed, batch_size=ledger.geometry.num_blocks)
        else:
            self._closed_gate = first_closed(ledger.config, self.pressure())
            if self._closed_gate is None:
                self._note_what_lacked(self._reclaim(freed))

    def hand_over(self, plan: StepPlan) -> None:
        """Put the step's copies into the worker's plan."""
        if not self.planned:
            return
        bounds = [bound for bound, _ in self.planned.values()]
        flights = [flight for _, flight in self.planned.values()]
        plan.source_slots = np.concatenate([b.source_slots for b in bounds])
        plan.destination_slots = np.concatenate([b.destination_slots for b in bounds])
        self._check_one_pass(plan)
        self._in_flight[self._ledger.step] = flights
        self.in_flight_blocks = frozenset(
            block
            for flight in flights
            for block in (*flight.relocation.source_blocks, *flight.relocation.destination_blocks)
        )
        self.planned.clear()

    def _check_one_pass(self, plan: StepPlan) -> None:
        """The copies of one step are of requests that still hold what was planned, in any order."""
        states, step = self._ledger.states, self._ledger.step
        for name in self.planned:
            if name not in states or states[name].in_flight_step != step:
                self._ledger.violated(
                    InvariantViolation("I4", f"{name} has let go of the blocks of its plan")
                )
        if wrong := order_dependence(plan.source_slots, plan.destination_slots):
            self._ledger.violated(InvariantViolation("I4", f"step {step} {wrong}"))

    def finish_step(self, step: int, copy_us: int) -> None:
        """The worker has executed the copies of `step`."""
        for flight in self._in_flight.pop(step, []):
            self._record(flight, step, copy_us)

    def drop(self, request_id: str) -> None:
        """The request lets go of its blocks: what was planned for it leaves the step's plan."""
        planned = self.planned.pop(request_id, None)
        if planned is not None:
            self._bequeath(*planned)
            if planned[1].operation_id is not None:
                finished = self.operations.drop_part(planned[1].operation_id)
                if finished is not None:
                    self.operations.finish(finished)
        for operation in self.operations.list_pending():
            if operation.request_id == request_id:
                self.operations.fail(operation, f"request {request_id} is no longer running")

    def settle(self) -> None:
        """Nobody holds a block any more: what is pending is done, and moved nothing."""
        for operation in self.operations.list_pending():
            self.operations.start(operation)
            self.operations.finish(operation)

    def num_planned_copies(self, step: int) -> int:
        """Tokens that the plan of `step` copies; 0 once its report has come."""
        return sum(f.relocation.moved_tokens for f in self._in_flight.get(step, ()))

    def _bequeath(self, plan: RelocationPlan, flight: InFlight) -> None:
        """What a group gains stands in one of its plans: one that is not dropped takes it over."""
        blocks = set(plan.shared_blocks)
        for other, heir in self.planned.values():
            if not blocks.isdisjoint(other.shared_blocks):
                heir.relocation.freed_blocks += flight.relocation.freed_blocks
                return

    @property
    def num_in_flight_tokens(self) -> int:
        return sum(f.relocation.moved_tokens for fs in self._in_flight.values() for f in fs)

    def pressure(
        self, *, ahead: int = 0, count_low_utilization: Callable[[], int] | None = None
    ) -> Pressure:
        """What the gates see in this step, or, as it stands now, `ahead` steps later.

        `count_low_utilization`: where it has been counted already.
        """
        ledger = self._ledger
        pool = ledger.tables.pool
        return Pressure(
            f=pool.fragmentation,
            free_blocks=ledger.store.num_free_blocks(),
            steps_since_round=ledger.step + ahead - self._last_round_step,
            last_round_empty=self._last_round_empty,
            count_low_utilization=count_low_utilization or pool.num_low_utilization,
            wanted_blocks=ledger.wanted_blocks,
        )

    def _has_excess(self, table: TokenTable) -> bool:
        """Whether the request has evicted, and holds more blocks than it needs."""
        return table.virtual and (
            num_excess_blocks(len(table.blocks), table.num_live, table.block_size) > 0
        )

    def note_held_back(self) -> None:
        """A round could have gained something in this step: count the gate that was closed."""
        if self._closed_gate is not None:
            self._ledger.counters.deferrals[self._closed_gate] += 1

    def _note_what_lacked(self, found: Round) -> None:
        """An automatic round ran: count what kept it from more."""
        ledger = self._ledger
        if found.missing_blocks:
            ledger.counters.deferrals[HEADROOM] += 1
        elif not found.plans and any(
            ledger.states[table.request_id].in_flight_step and self._has_excess(table)
            for table in ledger.tables
        ):
            ledger.counters.deferrals[IN_FLIGHT] += 1

    def layouts(self, request_ids: Iterable[str] | None = None) -> Iterator[Layout]:
        """Snapshots, made when taken, of the virtual requests that hold more blocks than they need.

        The most empty slots first; requests with a relocation in flight are left out (I4).
        """
        size = self._ledger.geometry.block_size
        known = self._ledger.tables
        asked = known if request_ids is None else map(known.__getitem__, request_ids)
        tables = [
            table
            for table in asked
            if self._has_excess(table) and not self._ledger.states[table.request_id].in_flight_step
        ]
        tables.sort(key=lambda table: table.num_live - len(table.blocks) * size)
        return map(self.layout_of, tables)

    def layout_of(self, table: TokenTable, dead: Ids | None = None) -> Layout:
        """The planner's snapshot of one table; `dead`: ids to be counted as dead already."""
        grid = table.grid()
        if dead is not None and len(dead):
            grid[np.isin(grid, dead)] = -1
        store = self._ledger.store
        # Blocks outside `readonly` are private and unhashed, see RequestState.
        readonly = self._ledger.states[table.request_id].readonly
        asked = [
            (i, block)
            for i, block in enumerate(table.blocks if readonly or not table.virtual else ())
            if not table.virtual or block in readonly
        ]
        movable = np.ones(len(table.blocks), dtype=np.bool_)
        writable = movable.copy()
        for i, block in asked:
            movable[i] = not store.is_shared(block)
            writable[i] = store.is_writable(block)
        return Layout(table.request_id, tuple(table.blocks), grid, movable, writable)

    def headroom(self, config: VTokenConfig) -> int:
        return min(config.headroom_blocks, self._ledger.store.num_free_blocks())

    def _reclaim(
        self,
        freed: list[int],
        *,
        batch_size: int | None = None,
        request_ids: list[str] | None = None,
        operation_id: str | None = None,
    ) -> Round:
        started = time.perf_counter_ns()
        self._last_round_step = self._ledger.step
        available = self.headroom(self._ledger.config)
        found = plan_round(
            self.layouts(request_ids),
            self._ledger.config,
            holders=self._ledger.tables.pool.holders,
            batch_size=batch_size or self._ledger.config.batch_size,
            headroom_blocks=available,
        )
        plan_us = (time.perf_counter_ns() - started) // 1000
        self._ledger.counters.plan_us += plan_us
        self._last_round_empty = not found.plans
        self.num_rounds += bool(found.plans)
        if found.missing_blocks:
            self._note_deferral(found.missing_blocks, available)
        self._ledger.counters.shared_skipped_blocks += found.shared_skipped_blocks
        used = self._ledger.tables.pool.num_used
        for plan in found.plans:
            self._apply(plan, freed, plan_us // len(found.plans), operation_id)
        num_freed = used - self._ledger.tables.pool.num_used
        if num_freed != found.num_freed_blocks:
            self._ledger.violated(
                InvariantViolation(
                    "I4",
                    f"a round promised to free {found.num_freed_blocks} blocks, {num_freed} are",
                )
            )
        return found

    def _note_deferral(self, missing: int, available: int) -> None:
        self._ledger.counters.deferred_rounds += 1
        now = time.monotonic()
        if now - self._last_deferral < DEFERRAL_EVENT_SECONDS:
            return
        self._last_deferral = now
        needed = missing + available
        self._ledger.events.add(
            self._ledger.step,
            "deferred",
            f"deferred: {missing} more headroom blocks needed than the {available} available",
            {"reason": "headroom", "needed_blocks": needed, "available_blocks": available},
        )

    def _apply(
        self, plan: RelocationPlan, freed: list[int], plan_us: int, operation_id: str | None
    ) -> None:
        ledger, size = self._ledger, self._ledger.geometry.block_size
        table = ledger.tables[plan.request_id]
        state = ledger.states[plan.request_id]
        if state.in_flight_step:
            ledger.violated(
                InvariantViolation(
                    "I4",
                    f"{plan.request_id} has a relocation of step {state.in_flight_step} in flight",
                )
            )
        num_shed = plan.num_shed_blocks
        fresh = ledger.store.take(plan.num_fresh_blocks) if plan.num_fresh_blocks else []
        bound = plan.bind(fresh, size)
        destinations = np.unique(bound.destination_slots // size).tolist()
        for block in destinations:
            if not ledger.store.is_writable(block):
                ledger.violated(
                    InvariantViolation("I4", f"destination block {block} is not private")
                )
        pending = ledger.pending(table)
        try:
            dropped = table.apply_moves(bound.token_ids, bound.destination_slots, bound.blocks)
        except InvariantViolation as violation:  # nothing was moved
            freed.extend(fresh)
            ledger.violated(violation)
            return
        if len(dropped) - len(fresh) != num_shed or num_shed <= 0:
            ledger.violated(
                InvariantViolation(
                    "I4", f"{len(dropped)} blocks left, {len(fresh)} taken, {num_shed} promised"
                )
            )
        pending.moved_ids, pending.moved_slots = bound.token_ids, bound.destination_slots
        if self._samples():
            ids = table.live_ids()
            pending.retained = Retained(ids, table.slots_of(ids))
        ledger.rebound(table)
        freed.extend(dropped)
        state.in_flight_step = ledger.step
        state.moved_tokens += plan.num_moved_tokens
        state.last_moves = state.last_moves or LastMoves()
        state.last_moves.moved(bound.token_ids, ledger.step)
        relocation = Relocation(
            request_id=plan.request_id,
            moved_tokens=plan.num_moved_tokens,
            moved_bytes=plan.num_moved_tokens * ledger.geometry.bytes_per_token,
            source_blocks=list(plan.source_blocks),
            destination_blocks=destinations,
            freed_blocks=plan.num_freed_blocks,
            reason="manual" if operation_id else "auto",
            planner=plan.planner,
            plan_us=plan_us,
            shared_blocks=len(plan.shared_blocks),
        )
        flight = InFlight(relocation, operation_id)
        if plan.shared_blocks:
            left = np.isin(plan.source_slots // size, plan.shared_blocks)
            flight.shared_tokens = int(np.count_nonzero(left))
            holders = ledger.tables.pool.holders
            flight.shared_freed_blocks = sum(int(holders[b] == 0) for b in plan.shared_blocks)
        self.planned[plan.request_id] = (bound, flight)

    def _samples(self) -> bool:
        """Whether this relocation is verified by content: `verify_ratio` of them, evenly spread."""
        self._verify_credit += self._ledger.config.verify_ratio
        if self._verify_credit < 1.0 - 1e-9:
            return False
        self._verify_credit -= 1.0
        return True

    def _run_operations(self, freed: list[int]) -> None:
        for operation in self.operations.list_pending():
            if self._is_in_flight(operation.request_id):
                continue  # I4: its turn comes when that relocation has been reported
            self.operations.start(operation)
            ids = None if operation.request_id is None else [operation.request_id]
            found = self._reclaim(
                freed,
                batch_size=operation.batch_size,
                request_ids=ids,
                operation_id=operation.id,
            )
            self.operations.planned(operation, found, self._ledger.geometry.bytes_per_token)
            if not found.plans:
                self.operations.finish(operation)

    def _is_in_flight(self, request_id: str | None) -> bool:
        """Whether a relocation of this request, of any one for None, was not reported yet."""
        states = self._ledger.states
        if request_id is None:
            return any(state.in_flight_step for state in states.values())
        return request_id in states and bool(states[request_id].in_flight_step)

    def _record(self, flight: InFlight, step: int, copy_us: int) -> None:
        moved = flight.relocation
        moved.copy_us = copy_us
        flight.count(self._ledger.counters)
        state = self._ledger.states.get(moved.request_id)
        if state is not None and state.in_flight_step == step:  # else: of an earlier life
            state.in_flight_step = 0
        self._ledger.events.add(
            self._ledger.step, "relocation", flight.summary, msgspec.to_builtins(moved)
        )
        if flight.operation_id is not None:
            operation = self.operations.part_done(flight.operation_id, moved)
            if operation is not None:
                self.operations.finish(operation)
