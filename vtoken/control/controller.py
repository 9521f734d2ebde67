"""The control plane inside the engine: one command in, one reply out, between two steps.

Knows the runtime and the wire, not HTTP. A command that is refused changes nothing; one that is
accepted is in force from the next step on, and the reply says which.

Operations and their arguments (`Command.op`, `Command.args`):
  describe, status, config, policies, blocks, requests, frame      -
  patch_config   patch, if_match?, validate_only?, confirm_within_s?, guard_inter_token_p95_ms?,
                 guard_preemptions?, guard_for_s?
  undo, confirm  if_match?, validate_only?
  compact        request_id?, batch_size?, dry_run?         operation   id
  block id       request id      tokens request_id, start, limit      events after, limit, kind?
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from vtoken.config.values import merge_patch
from vtoken.control.arguments import boolean, check_fit, integer, text
from vtoken.control.report import Reporter
from vtoken.control.revisions import Revisions
from vtoken.control.trials import Clock, Terms
from vtoken.errors import RefusedError, UnknownRequestError
from vtoken.policies import describe_broken, describe_policies
from vtoken.wire import (
    BlocksDocument,
    Command,
    Describe,
    Frame,
    Operation,
    PatchResult,
    Problem,
    Reply,
    pack_array,
)

MAX_PAGE = 10_000


class Controller:
    """Answers commands about one runtime and changes its configuration."""

    def __init__(
        self,
        reporter: Reporter,
        telemetry_endpoint: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        self.reporter = reporter
        self.runtime = reporter.runtime
        self.telemetry_endpoint = telemetry_endpoint
        self.started_ts = time.time()
        self.revisions = Revisions(self.runtime, reporter.scheduling, clock)
        self._rows_of = -1  # `num_changes` of the tables when rows were told
        self._ops: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "status": lambda: self.reporter.status(),
            "frame": lambda: self.frame(),
            "config": self.revisions.document,
            "policies": lambda: [*describe_policies(), *describe_broken()],
            "patch_config": self.patch_config,
            "undo": self.undo,
            "confirm": self.confirm,
            "compact": self.compact,
            "operation": self.operation,
            "blocks": self.blocks,
            "block": self.block,
            "requests": self.reporter.rows,
            "request": self.request,
            "tokens": self.tokens,
            "events": self.events,
        }
        self._with_actor = {"patch_config", "undo", "confirm", "compact"}

    def note_started(self) -> None:
        """The engine is ready for its first request."""
        facts, runtime = self.reporter.facts, self.runtime
        size, usable = runtime.geometry.block_size, runtime.geometry.num_blocks - 1
        told = f"{facts.model} on {facts.device}, {usable:,} blocks of {size} slots"
        summary = f"engine started: {told}, policy {runtime.config.policy.name}"
        data = {"detail": "started", "scheduling": self.reporter.scheduling.state}
        runtime.events.add(runtime.step + 1, "server", summary, data)

    def before_step(self) -> None:
        """The engine is about to plan a step: what is due without anybody asking."""
        self.revisions.check_trial()

    def handle(self, command: Command) -> Reply:
        """Execute one command. Never raises for bad input; what it raises is a fault of our own."""
        op = self._ops.get(command.op)
        self.revisions.check_trial()
        try:
            if command.expires_ts is not None and time.time() > command.expires_ts:
                raise RefusedError(
                    "the call reached the engine after its caller had given up; nothing was done",
                    status=503,
                    title="Too late",
                )
            if op is None:
                raise RefusedError(
                    f"unknown command {command.op!r}",
                    field="op",
                    value=command.op,
                    bound=", ".join(self._ops),
                    status=400,
                )
            args = dict(command.args)
            if command.op in self._with_actor:
                args["actor"] = command.actor
            check_fit(command.op, op, args)
            return Reply(value=op(**args))
        except RefusedError as error:
            return Reply(
                problem=Problem(
                    status=error.status,
                    title=error.title,
                    detail=error.detail,
                    field=error.field,
                    value=error.value,
                    bound=error.bound,
                )
            )

    def handle_bytes(self, payload: bytes) -> bytes:
        """`handle` over msgpack, as the bus carries it."""
        try:
            command = msgspec.msgpack.decode(payload, type=Command)
        except msgspec.DecodeError as error:
            problem = Problem(status=400, title="Bad command", detail=str(error))
            return msgspec.msgpack.encode(Reply(problem=problem))
        return msgspec.msgpack.encode(self.handle(command))

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

    def frame(self, *, figures: bool = True) -> Frame:
        """What a stream client draws, at this step; to be encoded before the next one.

        Its arrays are views of the pool's: at 70,000 blocks a copy costs more than the figures.
        Without `figures` it still has them where requests came or went since they were told, so
        that every number in `owner` is that of a row.
        """
        tables = self.runtime.tables
        frame = Frame(
            step=self.runtime.step,
            live=self.reporter.live().data,  # type: ignore[arg-type]
            flags=self.reporter.flags().data,  # type: ignore[arg-type]
            owner=self.reporter.owner().data,  # type: ignore[arg-type]
        )
        if figures or self._rows_of != tables.num_changes:
            self._rows_of = tables.num_changes
            frame.requests = self.reporter.rows()
            frame.status = self.reporter.status(frame.requests)
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

    def block(self, id: int) -> Any:  # noqa: A002  (the command's argument name)
        return self.reporter.block(integer("id", id))

    def request(self, id: str) -> Any:  # noqa: A002
        return self.reporter.request(text("id", id))

    def tokens(self, request_id: str, start: int = 0, limit: int = 256) -> Any:
        return self.reporter.tokens(
            text("request_id", request_id),
            integer("start", start),
            integer("limit", limit, low=1, high=MAX_PAGE),
        )

    def events(self, after: int = 0, limit: int = 256, kind: str | None = None) -> Any:
        if kind is not None:
            text("kind", kind)
        return self.runtime.events.page(
            integer("after", after), integer("limit", limit, low=1, high=MAX_PAGE), kind
        )

    def operation(self, id: str) -> Operation:  # noqa: A002
        return self.runtime.operations.get(text("id", id))

    # ------------------------------------------------------------ changing

    def patch_config(
        self,
        patch: Any,
        if_match: int | None = None,
        validate_only: bool = False,
        confirm_within_s: int | None = None,
        guard_inter_token_p95_ms: float | None = None,
        guard_preemptions: int | None = None,
        guard_for_s: int | None = None,
        actor: str = "local",
    ) -> PatchResult:
        """Apply a JSON merge patch as a whole, from the next step on; or say what it would do."""
        boolean("validate_only", validate_only)
        self._match(if_match)
        terms = Terms.read(
            confirm_within_s, guard_inter_token_p95_ms, guard_preemptions, guard_for_s
        )
        runtime = self.runtime
        merged = merge_patch(
            runtime.config,
            patch,
            num_blocks=runtime.geometry.num_blocks,
            num_layers=runtime.geometry.num_layers,
        )
        runtime.policy_runner.require_all(merged)
        if not validate_only:
            self.revisions.require_no_trial()
            return self.revisions.change(merged, actor, terms)
        return self.revisions.outlook(merged, terms)

    def undo(
        self, if_match: int | None = None, validate_only: bool = False, actor: str = "local"
    ) -> PatchResult:
        """A new revision that restores the configuration before the newest one; or its outlook."""
        self._match(if_match)
        if boolean("validate_only", validate_only):
            return self.revisions.outlook_of_undo()
        return self.revisions.undo(actor)

    def confirm(
        self, if_match: int | None = None, validate_only: bool = False, actor: str = "local"
    ) -> PatchResult:
        """Keep the change that is on trial; or say what that would mean."""
        self._match(if_match)
        if boolean("validate_only", validate_only):
            return self.revisions.outlook_of_confirm()
        return self.revisions.confirm(actor)

    def _match(self, if_match: int | None) -> None:
        """Raises unless `if_match` is the newest revision, or None."""
        if if_match is not None:
            self.revisions.require(integer("If-Match", if_match))

    def compact(
        self,
        request_id: str | None = None,
        batch_size: int | None = None,
        dry_run: bool = False,
        actor: str = "local",
    ) -> Operation:
        """Relocate once, at the next step, whatever the gates say; `dry_run` only plans."""
        runtime = self.runtime
        if request_id is not None and text("request_id", request_id) not in runtime.tables:
            raise UnknownRequestError(request_id)
        size = (
            runtime.config.batch_size
            if batch_size is None
            else integer("batch_size", batch_size, low=1, high=runtime.geometry.num_blocks)
        )
        boolean("dry_run", dry_run)
        operation = runtime.operations.add(actor, request_id, size, dry_run)
        if dry_run:
            ids = None if request_id is None else [request_id]
            preview = runtime.round_planner.preview(
                runtime.config, request_ids=ids, batch_size=size
            )
            runtime.operations.planned(operation, preview.round, runtime.geometry.bytes_per_token)
            runtime.operations.finish(operation)
        elif len(runtime.tables) == 0:
            runtime.operations.finish(operation)  # nothing holds a block: done, nothing moved
        return operation
