"""What the routes and the stream work with: bus, hub, audit log and access rules of one server.

Knows how they are put together, not HTTP. The revision of the audit log is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vtoken import wire
from vtoken_api.access import Access
from vtoken_api.audit import AuditLog
from vtoken_api.bus import EngineBus
from vtoken_api.hub import Hub
from vtoken_api.inputs import CompactionRequest


@dataclass(slots=True)
class Service:
    """One per API server process."""

    bus: EngineBus
    hub: Hub
    access: Access
    audit: AuditLog = field(default_factory=AuditLog)

    async def patch_config(
        self, patch: dict[str, Any], if_match: int | None, validate_only: bool, actor: str
    ) -> wire.PatchResult:
        """Apply or try out a merge patch, all or nothing."""
        result = await self.bus.ask(
            "patch_config",
            wire.PatchResult,
            actor=actor,
            patch=patch,
            if_match=if_match,
            validate_only=validate_only,
        )
        self.audit.record(actor, "config", result.changes, result.revision, dry_run=validate_only)
        return result

    async def undo(self, actor: str) -> wire.PatchResult:
        """A new revision that restores the one before."""
        result = await self.bus.ask("undo", wire.PatchResult, actor=actor)
        self.audit.record(actor, "undo", result.changes, result.revision)
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
        return operation
