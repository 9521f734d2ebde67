"""What the routes and the stream work with: bus, hub, audit log, access rules and limits.

Knows how they are put together, not HTTP. The revision of the audit log is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vtoken import wire
from vtoken_api.auth.access import Access
from vtoken_api.auth.limits import RateLimits
from vtoken_api.auth.refusals import Refusals
from vtoken_api.bus import EngineBus
from vtoken_api.health import health
from vtoken_api.rest.inputs import CompactionRequest
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.audit_sync import Upkeep
from vtoken_api.state.flight_recorder import FlightRecorder
from vtoken_api.state.statedir import StateDir
from vtoken_api.stream.hub import Hub


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; what somebody tries out who may only read does not fill the audit log."""

    name: str
    can_control: bool = True


@dataclass(slots=True)
class Service:
    """One per API server process."""

    bus: EngineBus
    hub: Hub
    access: Access
    state: StateDir
    flight: FlightRecorder
    model_name: str = ""  # as vLLM's metrics name it
    process: str = ""  # which of several API processes of one server; empty: the only one
    audit: AuditLog = field(default_factory=AuditLog)
    limits: RateLimits = field(default_factory=RateLimits)
    refusals: Refusals = field(default_factory=Refusals)
    upkeep: Upkeep = field(init=False)

    def __post_init__(self) -> None:
        self.upkeep = Upkeep(self.hub, self.audit, self.state)
        self.hub.complete = self.complete

    def start(self) -> None:
        """Begin to follow the engine, to record, and to keep the audit log."""
        self.hub.start()
        self.flight.start()
        self.upkeep.start()

    def health(self) -> list[wire.Health]:
        """How this process is, part by part."""
        return health(self.hub, self.audit, self.flight)

    def complete(self, status: wire.Status) -> None:
        """Add to the engine's status what only this process knows: its health.

        Everything else of a status is the engine's (`vtoken.control.report`). REST answers and
        frames alike pass through here.
        """
        status.health = self.health()

    async def close(self) -> None:
        """Stop what runs in the background and let another process lead; clients stay connected."""
        await self.upkeep.close()
        await self.flight.close()
        await self.hub.close()
        self.audit.close()
        self.state.close()

    async def patch_config(
        self,
        patch: dict[str, Any],
        if_match: int | None,
        validate_only: bool,
        caller: Caller,
        terms: dict[str, float],
    ) -> wire.PatchResult:
        """Apply or try out a merge patch, all or nothing; `terms` put it on trial."""
        result = await self.bus.ask(
            "patch_config",
            wire.PatchResult,
            actor=caller.name,
            patch=patch,
            if_match=if_match,
            validate_only=validate_only,
            **terms,
        )
        action = "config" if result.trial is None else "trial"
        await self._enter(caller, action, result.changes, result.revision, validate_only)
        return result

    async def confirm(
        self, if_match: int | None, validate_only: bool, caller: Caller
    ) -> wire.PatchResult:
        """Keep the change that is on trial, or say what that would mean."""
        return await self._settle_trial("confirm", if_match, validate_only, caller)

    async def undo(
        self, if_match: int | None, validate_only: bool, caller: Caller
    ) -> wire.PatchResult:
        """A new revision that restores the one before, or what it would do."""
        return await self._settle_trial("undo", if_match, validate_only, caller)

    async def _settle_trial(
        self, op: str, if_match: int | None, validate_only: bool, caller: Caller
    ) -> wire.PatchResult:
        result = await self.bus.ask(
            op,
            wire.PatchResult,
            actor=caller.name,
            if_match=if_match,
            validate_only=validate_only,
        )
        await self._enter(caller, op, result.changes, result.revision, validate_only)
        return result

    async def compact(self, body: CompactionRequest, caller: Caller) -> wire.Operation:
        """Start a compaction, or plan one (`dry_run`)."""
        args: dict[str, Any] = {"dry_run": body.dry_run}
        if body.request_id is not None:
            args["request_id"] = body.request_id
        if body.batch_size is not None:
            args["batch_size"] = body.batch_size
        operation = await self.bus.ask("compact", wire.Operation, actor=caller.name, **args)
        config = await self.bus.ask("config", wire.ConfigDocument)
        changes: dict[str, list[Any]] = {
            "operation": [None, operation.id],
            "request_id": [None, operation.request_id],
            "batch_size": [None, operation.batch_size],
        }
        await self._enter(caller, "compact", changes, config.revision, body.dry_run)
        return operation

    async def _enter(
        self,
        caller: Caller,
        action: str,
        changes: dict[str, list[Any]],
        revision: int,
        dry_run: bool,
    ) -> None:
        """Enter an accepted call into the audit log."""
        if dry_run and not caller.can_control:
            return
        self.audit.record(caller.name, action, changes, revision, dry_run=dry_run)
        await self.audit.settle()
