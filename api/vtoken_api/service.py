"""What the routes and the stream work with: bus, hub, audit log, access rules and limits.

Knows how they are put together, not HTTP. The revision of the audit log is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vtoken import wire
from vtoken_api.access import Access
from vtoken_api.audit import AuditLog
from vtoken_api.bus import EngineBus
from vtoken_api.flight import FlightRecorder
from vtoken_api.hub import Hub
from vtoken_api.inputs import CompactionRequest
from vtoken_api.limits import RateLimits
from vtoken_api.refusals import Refusals
from vtoken_api.statedir import StateDir


@dataclass(slots=True)
class Service:
    """One per API server process."""

    bus: EngineBus
    hub: Hub
    access: Access
    state: StateDir
    flight: FlightRecorder
    model_name: str = ""  # as vLLM's metrics name it
    audit: AuditLog = field(default_factory=AuditLog)
    limits: RateLimits = field(default_factory=RateLimits)
    refusals: Refusals = field(default_factory=Refusals)

    def __post_init__(self) -> None:
        self.hub.on_events = self.record_own

    def record_own(self, events: list[wire.Event]) -> None:
        """Enter into the audit log what the engine did by itself: how trials ended.

        Every process of this server sees the events; on disk, where they share the log, the one
        that leads enters them.
        """
        for event in events:
            data = event.data
            own = event.kind == "config" and data.get("actor") in ("trial", "guard")
            if own and (self.state.error or self.state.try_lead()):
                action = "revert" if "reverted" in data else "keep"
                self.audit.record(data["actor"], action, data["changes"], data["revision"])

    async def close(self) -> None:
        """Stop what runs in the background and let another process lead; clients stay connected."""
        await self.flight.close()
        await self.hub.close()
        self.audit.close()
        self.state.close()

    async def patch_config(
        self,
        patch: dict[str, Any],
        if_match: int | None,
        validate_only: bool,
        actor: str,
        terms: dict[str, float],
    ) -> wire.PatchResult:
        """Apply or try out a merge patch, all or nothing; `terms` put it on trial."""
        result = await self.bus.ask(
            "patch_config",
            wire.PatchResult,
            actor=actor,
            patch=patch,
            if_match=if_match,
            validate_only=validate_only,
            **terms,
        )
        action = "config" if result.trial is None else "trial"
        self.audit.record(actor, action, result.changes, result.revision, dry_run=validate_only)
        await self.audit.settle()
        return result

    async def confirm(self, if_match: int | None, actor: str) -> wire.PatchResult:
        """Keep the change that is on trial."""
        result = await self.bus.ask("confirm", wire.PatchResult, actor=actor, if_match=if_match)
        self.audit.record(actor, "confirm", result.changes, result.revision)
        await self.audit.settle()
        return result

    async def undo(self, if_match: int | None, actor: str) -> wire.PatchResult:
        """A new revision that restores the one before."""
        result = await self.bus.ask("undo", wire.PatchResult, actor=actor, if_match=if_match)
        self.audit.record(actor, "undo", result.changes, result.revision)
        await self.audit.settle()
        return result

    async def compact(self, body: CompactionRequest, actor: str) -> wire.Operation:
        """Start a compaction, or plan one (`dry_run`)."""
        args: dict[str, Any] = {"dry_run": body.dry_run}
        if body.request_id is not None:
            args["request_id"] = body.request_id
        if body.batch_size is not None:
            args["batch_size"] = body.batch_size
        operation = await self.bus.ask("compact", wire.Operation, actor=actor, **args)
        config = await self.bus.ask("config", wire.ConfigDocument)
        changes: dict[str, list[Any]] = {
            "operation": [None, operation.id],
            "request_id": [None, operation.request_id],
            "batch_size": [None, operation.batch_size],
        }
        self.audit.record(actor, "compact", changes, config.revision, dry_run=body.dry_run)
        await self.audit.settle()
        return operation
