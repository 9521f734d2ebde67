"""The control plane inside the engine: one command in, one reply out, between two steps.

Knows the runtime and the wire, not HTTP. A command that is refused changes nothing; one that is
accepted is in force from the next step on, and the reply says which.

Operations and their arguments (`Command.op`, `Command.args`):
  describe, status, config, policies, blocks, requests, frame      -
  patch_config   patch, if_match?, validate_only?           undo
  compact        request_id?, batch_size?, dry_run?         operation   id
  block id       request id      tokens request_id, start, limit      events after, limit
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from vtoken.arguments import boolean, check_fit, integer, text
from vtoken.config import VTokenConfig, bounds, diff, merge_patch
from vtoken.errors import RefusedError, StaleRevisionError, UnknownRequestError
from vtoken.operations import describe_round
from vtoken.policies import describe_broken, describe_policies
from vtoken.reclaim import plan_round
from vtoken.report import Reporter
from vtoken.scoring import swap_notes
from vtoken.whatif import what_if
from vtoken.wire import (
    BlocksDocument,
    Command,
    ConfigDocument,
    Describe,
    Frame,
    Operation,
    PatchResult,
    Problem,
    Reply,
    Status,
    pack_array,
)

MAX_HISTORY = 64
MAX_PAGE = 10_000


class Controller:
    """Answers commands about one runtime and changes its configuration."""

    def __init__(self, reporter: Reporter, telemetry_endpoint: str = "") -> None:
        self.reporter = reporter
        self.runtime = reporter.runtime
        self.telemetry_endpoint = telemetry_endpoint
        self.revision = 1
        self.started_ts = time.time()
        self._history: list[VTokenConfig] = []
        self._ops: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "status": self.status,
            "frame": self.frame,
            "config": self.config_document,
            "policies": lambda: [*describe_policies(), *describe_broken()],
            "patch_config": self.patch_config,
            "undo": self.undo,
            "compact": self.compact,
            "operation": self.operation,
            "blocks": self.blocks,
            "block": self.block,
            "requests": self.reporter.rows,
            "request": self.request,
            "tokens": self.tokens,
            "events": self.events,
        }
        self._with_actor = {"patch_config", "undo", "compact"}

    def handle(self, command: Command) -> Reply:
        """Execute one command. Never raises for bad input; what it raises is a fault of our own."""
        op = self._ops.get(command.op)
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

    def status(self) -> Status:
        status = self.reporter.status()
        status.config_revision = self.revision
        return status

    def config_document(self) -> ConfigDocument:
        values = self.runtime.config.values()
        geometry = self.runtime.geometry
        return ConfigDocument(
            revision=self.revision,
            desired=values,
            effective=values,
            bounds=bounds(geometry.num_blocks, geometry.num_layers),
        )

    def frame(self) -> Frame:
        """Everything a stream client draws, at this step."""
        return Frame(
            status=self.status(),
            live=self.reporter.live().tobytes(),
            flags=self.reporter.flags().tobytes(),
            requests=self.reporter.rows(),
            config=self.config_document(),
            owner=self.reporter.owner().tobytes(),
        )

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

    def events(self, after: int = 0, limit: int = 256) -> Any:
        return self.runtime.events.page(
            integer("after", after), integer("limit", limit, low=1, high=MAX_PAGE)
        )

    def operation(self, id: str) -> Operation:  # noqa: A002
        return self.runtime.operations.get(text("id", id))

    # ------------------------------------------------------------ changing

    def patch_config(
        self,
        patch: Any,
        if_match: int | None = None,
        validate_only: bool = False,
        actor: str = "local",
    ) -> PatchResult:
        """Apply a JSON merge patch as a whole, from the next step on; or say what it would do."""
        boolean("validate_only", validate_only)
        if if_match is not None and integer("If-Match", if_match) != self.revision:
            raise StaleRevisionError(if_match, self.revision)
        geometry = self.runtime.geometry
        merged = merge_patch(
            self.runtime.config,
            patch,
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
        )
        self.runtime.judge.require(merged.policy)
        if validate_only:
            before, after = self.runtime.config.values(), merged.values()
            return PatchResult(
                revision=self.revision,
                applied_at_step=None,
                previous=before,
                effective=before,
                changes=diff(before, after),
                what_if=what_if(self.runtime, merged),
                notes=self._notes(merged),
            )
        return self._install(merged, actor, keep_history=True)

    def undo(self, actor: str = "local") -> PatchResult:
        """A new revision that restores the configuration before the newest one."""
        if not self._history:
            raise RefusedError(
                "there is no earlier configuration",
                field="undo",
                bound=f"at most {MAX_HISTORY} steps back",
                status=409,
                title="Nothing to undo",
            )
        return self._install(self._history.pop(), actor, keep_history=False)

    def _install(self, config: VTokenConfig, actor: str, *, keep_history: bool) -> PatchResult:
        before, after = self.runtime.config.values(), config.values()
        changes = diff(before, after)
        notes = self._notes(config)
        if changes:
            if keep_history:
                self._history = [*self._history[-MAX_HISTORY + 1 :], self.runtime.config]
            self.runtime.config = config
            self.revision += 1
            told = ", ".join(
                f"{name} {_short(a)} -> {_short(b)}" for name, (a, b) in changes.items()
            )
            self.runtime.events.add(
                self.runtime.step + 1,
                "config",
                f"{told} by {actor} (rev {self.revision})",
                {"revision": self.revision, "actor": actor, "changes": changes, "notes": notes},
            )
        return PatchResult(
            revision=self.revision,
            applied_at_step=self.runtime.step + 1,
            previous=before,
            effective=after,
            changes=changes,
            notes=notes,
        )

    def _notes(self, config: VTokenConfig) -> list[str]:
        """What a change to `config` means for the scores that are held."""
        return swap_notes(self.runtime.config, config, self.runtime.geometry.num_layers // 2)

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
            found = plan_round(
                runtime.relocator.layouts(None if request_id is None else [request_id]),
                runtime.config,
                holders=runtime.tables.pool.holders,
                batch_size=size,
                headroom_blocks=runtime.relocator.headroom(runtime.config),
            )
            operation.plan = describe_round(found, runtime.geometry.bytes_per_token)
            runtime.operations.finish(operation)
        elif len(runtime.tables) == 0:
            runtime.operations.finish(operation)  # nothing holds a block: done, nothing moved
        return operation


def _short(value: Any) -> str:
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return str(value)
