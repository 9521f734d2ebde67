"""Manual compactions as long-running operations: pending, running, done, failed or cancelled.

Independent of tables and HTTP. Allowed transitions:
    pending -> running | done | failed | cancelled,   running -> done | failed
Every new state is reported, except of dry runs; `running` is reported once the plan is known.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from vtoken.base.errors import RefusedError
from vtoken.base.request_ids import short_id
from vtoken.core.planning.round import Round
from vtoken.core.runtime.current_step import CurrentStep
from vtoken.sentences import counted
from vtoken.wire import Operation, OperationPlan, OperationResult, OperationState, Relocation

TRANSITIONS: dict[OperationState, tuple[OperationState, ...]] = {
    "pending": ("running", "done", "failed", "cancelled"),
    "running": ("done", "failed"),
    "done": (),
    "failed": (),
    "cancelled": (),
}
MAX_KEPT = 256
MAX_DRY_KEPT = 32  # separate, so read-only clients cannot displace other operations


@dataclass(slots=True)
class _Running:
    """A started operation. `parts_left`: requests whose relocation is not reported yet."""

    started: float
    parts_left: int = 0
    fault: str | None = None


class Operations:
    """The newest operations by id; finished ones are dropped beyond MAX_KEPT, MAX_DRY_KEPT.

    `on_change` is called with every operation, except dry runs, that enters a new state.
    """

    def __init__(self, on_change: Callable[[Operation], None] = lambda _: None) -> None:
        self._on_change = on_change
        self._all: OrderedDict[str, Operation] = OrderedDict()
        self._running: dict[str, _Running] = {}

    def add(
        self,
        actor: str,
        request_id: str | None,
        batch_size: int,
        dry_run: bool,
        revision: int = 0,
    ) -> Operation:
        operation = Operation(
            id=uuid.uuid4().hex[:12],
            state="pending",
            actor=actor,
            request_id=request_id,
            batch_size=batch_size,
            dry_run=dry_run,
            created_ts=time.time(),
            revision=revision,
        )
        self._all[operation.id] = operation
        alike = [old for old in self._all.values() if old.dry_run == dry_run]
        for old in alike[: -MAX_DRY_KEPT if dry_run else -MAX_KEPT]:
            if not TRANSITIONS[old.state]:
                del self._all[old.id]
        self._notify(operation)
        return operation

    def get(self, operation_id: str) -> Operation:
        operation = self._all.get(operation_id)
        if operation is None:
            raise RefusedError(
                f"no operation has the id {operation_id!r}",
                field="id",
                value=operation_id,
                bound=f"one of the newest {MAX_KEPT} operations",
                status=404,
                title="Unknown operation",
            )
        return operation

    def list_pending(self) -> list[Operation]:
        return [op for op in self._all.values() if op.state == "pending"]

    def start(self, operation: Operation) -> None:
        self._move(operation, "running")
        self._running[operation.id] = _Running(time.perf_counter())

    def planned(self, operation: Operation, found: Round, bytes_per_token: int) -> None:
        """Record the operation's planned round."""
        operation.plan = describe_round(found, bytes_per_token)
        operation.result = _no_result()
        if not operation.dry_run:
            self._running[operation.id].parts_left = len(found.plans)
        self._notify(operation)

    def part_ended(
        self, operation_id: str, moved: Relocation | None = None, fault: str | None = None
    ) -> None:
        """One request's relocation was copied (`moved`) or dropped, or has a `fault`: it is unknown
        whether it was copied.

        After the last one the operation is done, or failed if any had a fault.
        """
        operation, running = self._all[operation_id], self._running[operation_id]
        if fault is not None:
            running.fault = running.fault or fault
        elif moved is not None and operation.result is not None:
            operation.result.moved_tokens += moved.moved_tokens
            operation.result.moved_bytes += moved.moved_bytes
            operation.result.freed_blocks += moved.freed_blocks
        running.parts_left -= 1
        if running.parts_left > 0:
            return
        if running.fault is None:
            self.finish(operation)
        else:
            self.fail(operation, running.fault)

    def finish(self, operation: Operation) -> None:
        operation.result = operation.result or _no_result()
        running = self._running.pop(operation.id, None)
        if running is not None:
            operation.result.duration_ms = (time.perf_counter() - running.started) * 1e3
        self._move(operation, "done")

    def fail(self, operation: Operation, why: str) -> None:
        operation.error = why
        self._running.pop(operation.id, None)
        self._move(operation, "failed")

    def _move(self, operation: Operation, state: OperationState) -> None:
        if state not in TRANSITIONS[operation.state]:
            raise RuntimeError(
                f"operation {operation.id} is {operation.state}: expected a move to one of "
                f"{TRANSITIONS[operation.state]}, found {state}"
            )
        operation.state = state
        if state != "running":
            self._notify(operation)

    def _notify(self, operation: Operation) -> None:
        if not operation.dry_run:
            self._on_change(operation)


def _no_result() -> OperationResult:
    return OperationResult(moved_tokens=0, moved_bytes=0, freed_blocks=0, duration_ms=0.0)


def record_operation(current: CurrentStep, operation: Operation) -> None:
    """Add the event of an operation that entered a new state."""
    step = current.number + (operation.state == "pending")  # a pending one runs in the next step
    data = msgspec.to_builtins(operation)
    current.events.add(step, "operation", describe_operation(operation), data)


def describe_operation(operation: Operation) -> str:
    """One line for operators: the operation's state and result."""
    text = f"compaction {operation.id}"
    plan, result = operation.plan, operation.result
    if operation.state == "pending":
        whose = f" of {short_id(operation.request_id)}" if operation.request_id is not None else ""
        return f"{text}{whose} by {operation.actor} runs at the next step"
    if operation.state == "running" and plan is not None:
        return (
            f"{text} runs: {plan.moved_tokens:,} tokens of {counted(plan.requests, 'request')} "
            f"move, to free {counted(plan.freed_blocks, 'block')}"
        )
    if operation.state == "done" and result is not None:
        return (
            f"{text} done: moved {counted(result.moved_tokens, 'token')}, "
            f"freed {counted(result.freed_blocks, 'block')}"
        )
    return f"{text} {operation.state}" + (f": {operation.error}" if operation.error else "")


def describe_round(found: Round, bytes_per_token: int) -> OperationPlan:
    """A round's totals."""
    return OperationPlan(
        requests=len(found.plans),
        source_blocks=sum(len(plan.source_blocks) for plan in found.plans),
        destination_blocks=sum(plan.num_fresh_blocks for plan in found.plans),
        moved_tokens=found.num_moved_tokens,
        moved_bytes=found.num_moved_tokens * bytes_per_token,
        freed_blocks=found.num_freed_blocks,
        deferred_reason=(
            f"{found.missing_blocks} more headroom blocks needed" if found.missing_blocks else None
        ),
    )
