"""Manual compactions: the transition table, their results, and requests that end during one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import msgspec
import pytest

from tests.support.core.harness import LiveEngine, make_holes
from vtoken.base.errors import InvariantViolation, RefusedError
from vtoken.core.planning.round import Round
from vtoken.core.runtime.relocation.operations import (
    MAX_DRY_KEPT,
    MAX_KEPT,
    TRANSITIONS,
    Operations,
)
from vtoken.wire import Operation, OperationState

STATES: tuple[OperationState, ...] = get_args(OperationState)


@pytest.fixture
def engine() -> Iterator[LiveEngine]:
    """Holes everywhere, nothing reclaimed."""
    with make_holes(3) as live:
        yield live


def compact(engine: LiveEngine, **args: Any) -> Operation:
    out: Operation = engine.call("compact", **args)
    return out


# ---------------------------------------------------------------- the table


def test_the_transition_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(STATES)


@pytest.mark.parametrize(("old", "new"), [*product(STATES, ("running", "done", "failed"))])
def test_only_the_moves_of_the_table_are_allowed(old: OperationState, new: OperationState) -> None:
    operations = Operations()
    operation = operations.add("me", None, 1, False)
    operation.state = old
    move = {
        "running": operations.start,
        "done": operations.finish,
        "failed": lambda operation: operations.fail(operation, "why"),
    }[new]
    if new in TRANSITIONS[old]:
        move(operation)
        assert operation.state == new
    else:
        with pytest.raises(RuntimeError, match=f"is {old}.*found {new}"):
            move(operation)
        assert operation.state == old


def known(operations: Operations, added: list[Operation]) -> int:
    """How many of the operations are not forgotten."""
    count = 0
    for operation in added:
        with contextlib.suppress(RefusedError):
            count += operations.get(operation.id) is operation
    return count


def test_finished_operations_are_forgotten_before_unfinished_ones() -> None:
    operations = Operations()
    waiting = operations.add("me", None, 1, False)
    done = [operations.add("me", None, 1, False) for _ in range(MAX_KEPT + 20)]
    for operation in done:
        operations.finish(operation)
    operations.add("me", None, 1, False)
    assert operations.get(waiting.id) is waiting
    assert known(operations, done) < MAX_KEPT


def test_dry_runs_push_out_dry_runs_only() -> None:
    operations = Operations()
    done = operations.add("me", None, 1, False)
    operations.finish(done)
    dry = []
    for _ in range(MAX_KEPT + 20):
        dry.append(operations.add("somebody who may only read", None, 1, True))
        operations.finish(dry[-1])
    assert operations.get(done.id) is done
    assert operations.get(dry[-1].id) is dry[-1]
    assert known(operations, dry) <= MAX_DRY_KEPT


def test_a_round_without_plans_finishes_with_zeroes() -> None:
    operations = Operations()
    operation = operations.add("me", None, 1, False)
    operations.start(operation)
    operations.planned(operation, Round((), 0), 1)
    operations.finish(operation)
    assert operation.state == "done"
    assert operation.result is not None
    assert operation.result.moved_tokens == operation.result.freed_blocks == 0


# ---------------------------------------------------------------- in the engine


def test_a_compaction_runs_at_the_next_step_and_reports_what_was_freed(engine: LiveEngine) -> None:
    held = engine.call("status").blocks.used
    operation = compact(engine)
    assert operation.state == "pending"
    engine.steps()
    done = engine.call("operation", id=operation.id)
    assert done.state == "done"
    assert done.plan.requests == 3
    assert done.result.freed_blocks == done.plan.freed_blocks > 0
    assert done.result.moved_tokens == done.plan.moved_tokens > 0
    assert done.result.moved_bytes == done.plan.moved_bytes
    # each request appends one token in the same step
    used = engine.call("status").blocks.used
    assert held - done.result.freed_blocks <= used <= held - done.result.freed_blocks + 3
    assert engine.call("status").reclamation.moved_tokens == done.result.moved_tokens


def test_a_dry_run_plans_the_same_and_moves_nothing(engine: LiveEngine) -> None:
    before = engine.call("blocks")
    dry = compact(engine, dry_run=True)
    assert (dry.state, dry.dry_run) == ("done", True)
    assert dry.plan is not None
    assert dry.result is not None
    assert dry.result.moved_tokens == 0
    assert engine.call("blocks") == before
    wet = compact(engine)
    engine.steps()
    assert engine.call("operation", id=wet.id).plan == dry.plan


def test_a_compaction_of_one_request_leaves_the_others_alone(engine: LiveEngine) -> None:
    rows = {row.id: row.moved_tokens for row in engine.call("requests")}
    assert set(rows.values()) == {0}
    compact(engine, request_id="req-1", batch_size=3)
    engine.steps()
    moved = {row.id: row.moved_tokens for row in engine.call("requests")}
    assert moved["req-1"] > 0
    assert moved["req-0"] == moved["req-2"] == 0


def test_a_request_that_ends_while_its_copy_is_in_flight_still_finishes_the_operation(
    engine: LiveEngine,
) -> None:
    engine.core.worker_lag_steps = 1
    operation = compact(engine)
    engine.steps()
    assert engine.call("operation", id=operation.id).state == "running"
    assert engine.call("status").reclamation.in_flight > 0
    engine.core.remove("req-1")
    engine.steps()
    assert engine.call("operation", id=operation.id).state == "done"
    assert engine.call("status").reclamation.in_flight == 0


@pytest.mark.parametrize("lost", [1, 3])
def test_requests_preempted_between_plan_and_commit_do_not_hang_the_operation(
    engine: LiveEngine, lost: int
) -> None:
    core = engine.core
    operation = compact(engine)
    begin = core.runtime.begin_step

    def begin_then_preempt(ready: Any) -> None:
        begin(ready)
        for _ in range(lost):
            core.preempt_newest()

    core.runtime.begin_step = begin_then_preempt  # type: ignore[method-assign]
    engine.steps()
    core.runtime.begin_step = begin  # type: ignore[method-assign]
    done = engine.call("operation", id=operation.id)
    assert done.state == "done"
    assert (done.result.moved_tokens > 0) == (lost < 3)
    assert done.result.moved_tokens == engine.call("status").reclamation.moved_tokens


@pytest.mark.parametrize(
    ("args", "status", "field"),
    [
        ({"request_id": "nobody"}, 404, "request_id"),
        ({"request_id": ""}, 404, "request_id"),
        ({"batch_size": 0}, 422, "batch_size"),
        ({"batch_size": 97}, 422, "batch_size"),
        ({"batch_size": True}, 422, "batch_size"),
        ({"batch_size": 2.0}, 422, "batch_size"),
        ({"dry_run": 1}, 422, "dry_run"),
        ({"dry_run": None}, 422, "dry_run"),
    ],
)
def test_a_bad_compaction_is_refused_and_queues_nothing(
    engine: LiveEngine, args: dict[str, Any], status: int, field: str
) -> None:
    reply = engine.ask("compact", **args)
    assert reply.problem is not None
    assert (reply.problem.status, reply.problem.field) == (status, field)
    assert not engine.core.runtime.operations.list_pending()


def test_an_unknown_operation_is_a_404(engine: LiveEngine) -> None:
    reply = engine.ask("operation", id="x")
    assert reply.problem is not None
    assert reply.problem.status == 404


# ---------------------------------------------------------------- missing reports


@pytest.fixture
def lenient(engine: LiveEngine) -> LiveEngine:
    """Violations are reported and the engine continues."""
    engine.core.runtime.current.strict = False
    return engine


def test_a_compaction_whose_report_is_lost_fails_with_an_error(
    lenient: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step's report shows that the worker has passed it."""
    runtime = lenient.core.runtime
    operation = compact(lenient)
    with monkeypatch.context() as lost:
        lost.setattr(runtime, "finish_step", lambda *_: None)
        lenient.steps()
    step = runtime.step
    assert lenient.call("operation", id=operation.id).state == "running"
    lenient.steps()
    failed = lenient.call("operation", id=operation.id)
    assert failed.state == "failed"
    assert failed.error == f"step {step} copies {copies(failed)} tokens, none was reported"
    assert runtime.counters.invariants.violations == 1
    assert not any(map(runtime.requests.in_flight_step, runtime.requests.held))
    again = compact(lenient)
    lenient.steps()
    assert lenient.call("operation", id=again.id).state == "done"


def copies(operation: Operation) -> int:
    assert operation.plan is not None
    return operation.plan.moved_tokens


@pytest.mark.parametrize("missing", [1, None])
def test_a_compaction_of_which_less_is_reported_than_planned_fails(
    lenient: LiveEngine, monkeypatch: pytest.MonkeyPatch, missing: int | None
) -> None:
    worker = lenient.core.worker
    execute = worker.execute

    def deny(message: Any) -> Any:
        report = execute(message)
        report.moved_tokens -= missing or 0
        return None if missing is None else report

    operation = compact(lenient)
    monkeypatch.setattr(worker, "execute", deny)
    lenient.steps()
    failed = lenient.call("operation", id=operation.id)
    assert failed.state == "failed"
    assert f"copies {copies(failed)} tokens" in failed.error


def test_a_compaction_whose_plan_cannot_be_applied_fails(
    lenient: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise InvariantViolation("I2", "a slot has a reader")

    operation = compact(lenient)
    with monkeypatch.context() as broken:
        broken.setattr(lenient.core.runtime.tables, "apply_moves", refuse)
        lenient.steps()
    failed = lenient.call("operation", id=operation.id)
    assert failed.state == "failed"
    assert "could not be applied" in failed.error


# ---------------------------------------------------------------- events


def operation_events(engine: LiveEngine) -> list[tuple[str, str]]:
    """State and id of every operation event, oldest first."""
    events = engine.call("events", limit=10_000, kind="operation").events
    for event in events:
        document = msgspec.convert(event.data, Operation)
        assert document.id in event.summary
    return [(event.data["state"], event.data["id"]) for event in events]


def test_every_state_of_a_compaction_is_an_event(engine: LiveEngine) -> None:
    operation = compact(engine)
    assert operation_events(engine) == [("pending", operation.id)]
    engine.steps(2)
    states = ["pending", "running", "done"]
    assert operation_events(engine) == [(state, operation.id) for state in states]
    pending, running, done = engine.call("events", limit=10_000, kind="operation").events
    assert pending.step == running.step == done.step
    assert running.data["plan"]["freed_blocks"] == done.data["result"]["freed_blocks"] > 0
    assert done.summary == (
        f"compaction {operation.id} done: moved {done.data['result']['moved_tokens']:,} tokens, "
        f"freed {done.data['result']['freed_blocks']:,} blocks"
    )


def test_a_failed_compaction_is_an_event_with_the_reason(engine: LiveEngine) -> None:
    operation = compact(engine, request_id="req-1")
    engine.core.remove("req-1")
    assert operation_events(engine) == [("pending", operation.id), ("failed", operation.id)]
    failed = engine.call("events", limit=10_000, kind="operation").events[-1]
    assert failed.summary.endswith("failed: request req-1 is no longer running")


def test_a_dry_run_adds_no_event(engine: LiveEngine) -> None:
    """Clients with read access must not be able to push out the operations of others."""
    compact(engine, dry_run=True)
    engine.steps()
    assert operation_events(engine) == []


def test_a_compaction_of_an_idle_engine_adds_a_done_event(engine: LiveEngine) -> None:
    engine.concurrency = 0
    for request in list(engine.core.running):
        engine.core.remove(request.id)
    operation = compact(engine)
    assert operation.state == "done"
    assert operation_events(engine) == [("pending", operation.id), ("done", operation.id)]


def test_the_start_of_the_engine_is_an_event(engine: LiveEngine) -> None:
    engine.controller.note_started()
    (event,) = engine.call("events", kind="server").events
    assert event.summary == "engine started: simulated on cpu, 95 blocks of 4 slots, policy random"
    assert event.data["detail"] == "started"
