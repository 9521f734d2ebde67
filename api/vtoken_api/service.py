"""The service behind routes and stream: bus, hub, audit log, flight recorder and access control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vtoken import commands, wire
from vtoken_api.auth.guard import AccessControl
from vtoken_api.bus import EngineBus
from vtoken_api.fanout.hub import Hub
from vtoken_api.health import health
from vtoken_api.state.audit import AuditLog
from vtoken_api.state.audit_sync import AuditSync
from vtoken_api.state.flight_recorder import FlightRecorder
from vtoken_api.state.statedir import StateDir
from vtoken_api.text import RequestTexts


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; dry runs of readers are not audited."""

    name: str
    can_control: bool = True


@dataclass(slots=True)
class Service:
    """One per server."""

    bus: EngineBus
    hub: Hub
    auth: AccessControl
    state: StateDir
    flight: FlightRecorder
    texts: RequestTexts
    audit: AuditLog
    model_name: str  # as vLLM's metrics name it
    audit_sync: AuditSync = field(init=False)

    def __post_init__(self) -> None:
        self.audit_sync = AuditSync(self.hub, self.audit)
        self.audit.on_entry = self.flight.audit
        self.hub.complete = self.complete

    def start(self) -> None:
        """Start following the engine, recording and synchronising the audit log."""
        self.hub.start()
        self.flight.start()
        self.audit_sync.start()

    def health(self) -> list[wire.Health]:
        """The health of this process, part by part."""
        return health(self.hub, self.audit, self.flight)

    def complete(self, status: wire.Status) -> None:
        """Add the health of this process to a status; the engine supplies all other fields."""
        status.health = self.health()

    async def close(self) -> None:
        """Stop the background tasks and release the state directory; clients stay connected."""
        await self.audit_sync.close()
        await self.flight.close()
        await self.hub.close()
        self.audit.close()
        self.state.close()

    async def change(
        self, call: commands.PatchConfig | commands.Confirm | commands.Undo, caller: Caller
    ) -> wire.PatchResult:
        """Change the configuration, confirm or undo a change, or report what that would do."""
        result = await self.bus.ask(call, wire.PatchResult, caller.name)
        action = commands.name_of(type(call))
        if isinstance(call, commands.PatchConfig):
            action = "config" if result.trial is None else "trial"
        await self._enter(caller, action, result.changes, result.revision, call.validate_only)
        return result

    async def compact(self, call: commands.Compact, caller: Caller) -> wire.Operation:
        """Start a compaction, or only plan it (`dry_run`)."""
        operation = await self.bus.ask(call, wire.Operation, caller.name)
        config = await self.bus.ask(commands.Config(), wire.ConfigDocument)
        changes: dict[str, list[Any]] = {
            "operation": [None, operation.id],
            "request_id": [None, operation.request_id],
            "batch_size": [None, operation.batch_size],
        }
        await self._enter(caller, "compact", changes, config.revision, call.dry_run)
        return operation

    async def _enter(
        self,
        caller: Caller,
        action: str,
        changes: dict[str, list[Any]],
        revision: int,
        dry_run: bool,
    ) -> None:
        """Add an accepted call to the audit log."""
        if dry_run and not caller.can_control:
            return
        self.audit.record(caller.name, action, changes, revision, dry_run=dry_run)
        await self.audit.settle()
