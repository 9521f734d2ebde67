"""The control plane inside the engine: one command in, one reply out, between two steps.

A refused command changes nothing. An accepted one takes effect in the next step; the reply names
that step. `vtoken.wire.commands` defines the calls and their arguments. Nothing here depends on
HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, assert_never

import msgspec

from vtoken.base.errors import RefusedError, UnknownRequestError
from vtoken.control.dry_runs import DryRuns
from vtoken.control.ending import EndRequest, end
from vtoken.control.forgetting import forget
from vtoken.control.guard_watch import Clock
from vtoken.control.outcomes import Outcomes
from vtoken.control.parking import restore
from vtoken.control.report import Reporter
from vtoken.control.revisions import Revisions
from vtoken.control.status import FINDING_S
from vtoken.core.config.values import bounds
from vtoken.policies import describe_broken, describe_policies
from vtoken.sentences import counted
from vtoken.wire import (
    BlocksDocument,
    Describe,
    Frame,
    Operation,
    PatchResult,
    Point,
    Problem,
    Reply,
    Status,
    commands,
    pack_array,
)
from vtoken.wire.bounds import check
from vtoken.wire.commands import AnyCall, Command, read_command

POINT_S = 0.95  # between two points of the history
NUM_POINTS = 900


class Controller:
    """Answers commands about one runtime and changes its configuration."""

    def __init__(
        self,
        reporter: Reporter,
        telemetry_endpoint: str = "",
        clock: Clock = time.monotonic,
        *,
        end_request: EndRequest | None = None,
    ) -> None:
        """`end_request` ends one in the engine; without an engine, the runtime releases it."""
        self.reporter = reporter
        self.runtime = reporter.runtime
        self._end_request = end_request or self.runtime.release
        self.telemetry_endpoint = telemetry_endpoint
        self.started_ts = time.time()
        self.dry_runs = DryRuns(self.runtime)
        self.revisions = Revisions(reporter.engine_status, self.dry_runs, clock)
        self.outcomes = Outcomes()
        # What charts need of the last quarter of an hour, from the statuses that frames have
        # anyway.
        self.history: deque[Point] = deque(maxlen=NUM_POINTS)
        self._rows_version = -1  # `num_changes` of the tables when rows were last sent
        self._weights_step = -1  # of the newest event of weights that may have changed

    def note_started(self) -> None:
        """Add the event of the engine's start; the engine is ready for its first request."""
        facts, runtime = self.reporter.facts, self.runtime
        size, usable = runtime.geometry.block_size, runtime.geometry.num_blocks - 1
        served = f"{facts.model} on {facts.device}, {usable:,} blocks of {size} slots"
        summary = f"engine started: {served}, policy {runtime.config.policy.name}"
        data = {"detail": "started", "scheduling": self.reporter.scheduling.state}
        runtime.events.add(runtime.step + 1, "server", summary, data)

    def note_weights(self, call: str, num_dropped: int) -> None:
        """Add the event of a `call` that may change the model's weights, unless this step has one.

        `num_dropped`: how many outputs the canary does not check because of it.
        """
        runtime = self.runtime
        if num_dropped or self._weights_step != runtime.step:
            self._weights_step = runtime.step
            summary = f"{call} may have changed the weights"
            if num_dropped:
                summary += f": {counted(num_dropped, 'output')} of before are not checked"
            runtime.events.add(
                runtime.step, "weights", summary, {"call": call, "dropped": num_dropped}
            )

    def before_step(self) -> None:
        """End a trial that is over; called before each step is planned."""
        self.revisions.check_trial()

    def handle(self, command: Command) -> Reply:
        """Execute one command. Bad input is answered with a problem; an exception is a bug."""
        started = time.thread_time()
        self.revisions.check_trial()
        reply = self._reply_once(command)
        reply.engine_s = time.thread_time() - started
        return reply

    def _reply_once(self, command: Command) -> Reply:
        change_id = command.change_id
        if change_id is None:
            return self._reply(command)
        try:
            self.outcomes.require_new(change_id)
        except RefusedError as error:
            return Reply(problem=Problem.of(error))
        reply = self._reply(command)
        self.outcomes.note(change_id, reply)
        return reply

    def _reply(self, command: Command) -> Reply:
        try:
            if command.expires_ts is not None and time.time() > command.expires_ts:
                raise RefusedError(
                    "nothing was done: the call reached the engine after its caller's timeout",
                    status=503,
                    title="Too late",
                )
            return Reply(value=self._answer(command.call, command.actor))
        except RefusedError as error:
            return Reply(problem=Problem.of(error))

    def handle_bytes(self, payload: bytes) -> bytes:
        """`handle` over msgpack, as the bus carries it."""
        try:
            command = read_command(payload)
        except RefusedError as error:
            return msgspec.msgpack.encode(Reply(problem=Problem.of(error)))
        reply = self.handle(command)
        started = time.thread_time()
        reply.value = msgspec.Raw(msgspec.msgpack.encode(reply.value))
        reply.engine_s += time.thread_time() - started
        return msgspec.msgpack.encode(reply)

    def _answer(self, call: AnyCall, actor: str) -> Any:
        match call:
            case commands.Describe():
                return self.describe()
            case commands.Status():
                return self.status()
            case commands.Config():
                return self.revisions.document()
            case commands.Policies():
                return [*describe_policies(), *describe_broken()]
            case commands.Frame():
                return self.frame(max_age_s=0.0)
            case commands.Blocks():
                return self.blocks()
            case commands.Block():
                return self.reporter.block(call.id)
            case commands.Requests():
                return self.reporter.rows()
            case commands.Find():
                return self.reporter.named(call.name)
            case commands.Request():
                return self.reporter.request(call.request_id)
            case commands.Tokens():
                return self.reporter.tokens(call.request_id, call.start, call.limit)
            case commands.Text():
                return self.reporter.text(call.request_id, call.start, call.limit)
            case commands.Events():
                return self.runtime.events.page(call.after, call.limit, call.kind)
            case commands.Operation():
                return self.runtime.operations.get(call.id)
            case commands.History():
                return [*self.history]
            case commands.Change():
                return self.outcomes.get(call.id)
            case commands.PatchConfig() | commands.Undo() | commands.Confirm():
                return self.revisions.make(call, actor)
            case commands.Validate():
                return self.revisions.validate(call.change)
            case commands.Preview():
                return self.revisions.preview(call.change)
            case commands.Compact():
                return self.compact(call, actor)
            case commands.Forget():
                request_id = self.reporter.living(call.request_id)
                num_known = self.reporter.num_tokens(request_id)
                return forget(self.runtime, request_id, call.spans, num_known, actor)
            case commands.End():
                request_id = self.reporter.living(call.request_id)
                return end(self.runtime, request_id, actor, self._end_request)
            case commands.Restore():
                request_id = self.reporter.living(call.request_id)
                return restore(self.runtime, request_id, dry_run=call.dry_run)
        assert_never(call)

    # ------------------------------------------------------------ reading

    def describe(self) -> Describe:
        facts = self.reporter.facts
        return Describe(
            epoch=facts.epoch,
            vtoken_version=facts.vtoken_version,
            vllm_version=facts.vllm_version,
            model=facts.model,
            device=facts.device,
            geometry=self.runtime.geometry,
            telemetry_endpoint=self.telemetry_endpoint,
            policies=describe_policies(),
            started_ts=self.started_ts,
        )

    def status(self) -> Status:
        """The status now, with the guards of a trial."""
        status = self.reporter.status()
        status.guards = self.revisions.guards()
        return status

    def frame(self, *, with_status: bool = True, max_age_s: float = FINDING_S) -> Frame:
        """The state at this step, for stream clients. Encode it before the next step.

        The arrays are views of the pool's: at 70,000 blocks a copy costs more than the status.
        `with_status`: with status, rows and configuration. They are also included whenever requests
        came or went since the last ones, so that every number in `owner` has a row. `max_age_s`:
        how old what the planner found may be.
        """
        tables = self.runtime.tables
        frame = Frame(
            step=self.runtime.step,
            live=self.reporter.live().data,  # type: ignore[arg-type]
            flags=self.reporter.flags().data,  # type: ignore[arg-type]
            owner=self.reporter.owner().data,  # type: ignore[arg-type]
        )
        if with_status or self._rows_version != tables.num_changes:
            self._rows_version = tables.num_changes
            outlook = self.reporter.outlook()
            frame.requests = self.reporter.rows(outlook)
            frame.status = self.reporter.status(outlook, max_age_s=max_age_s)
            frame.status.guards = self.revisions.guards()
            if not self.history or frame.status.ts - self.history[-1].ts >= POINT_S:
                self.history.append(Point.of(frame.status))
            frame.config = self.revisions.document()
        return frame

    def blocks(self) -> BlocksDocument:
        return BlocksDocument(
            block_size=self.runtime.geometry.block_size,
            num_blocks=self.runtime.geometry.num_blocks,
            step=self.runtime.step,
            live=pack_array(self.reporter.live(), packed=True),
            flags=pack_array(self.reporter.flags(), packed=True),
            owner=pack_array(self.reporter.owner(), packed=True),
        )

    # ------------------------------------------------------------ changing

    def patch_config(self, patch: dict[str, Any], actor: str = "local") -> PatchResult:
        """Apply a JSON merge patch atomically from the next step on; raises RefusedError."""
        return self.revisions.make(commands.PatchConfig(patch=patch), actor)

    def compact(self, call: commands.Compact, actor: str) -> Operation:
        """Run one round at the next step, with the gates bypassed; `dry_run` only plans it."""
        runtime, request_id = self.runtime, call.request_id
        if request_id is not None:
            request_id = self.reporter.living(request_id)
            if request_id not in runtime.tables:
                raise UnknownRequestError(request_id)
        size = runtime.config.batch_size if call.batch_size is None else call.batch_size
        if call.batch_size is not None:
            bound = bounds(runtime.geometry.num_blocks, runtime.geometry.num_layers)["batch_size"]
            check("batch_size", size, bound)
        operation = runtime.operations.add(
            actor, request_id, size, call.dry_run, revision=runtime.revision
        )
        if call.dry_run:
            found = self.dry_runs.compaction(request_id, size)
            runtime.operations.planned(operation, found, runtime.geometry.bytes_per_token)
            runtime.operations.finish(operation)
        elif len(runtime.tables) == 0:
            runtime.operations.finish(operation)  # no request holds a block: nothing to move
        return operation
