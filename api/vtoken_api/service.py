"""The service behind routes and stream: bus, hub, journal, recorder and access control."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vtoken import wire
from vtoken.wire import commands
from vtoken_api.auth.check import AccessControl
from vtoken_api.bus import EngineBus
from vtoken_api.fanout.hub import Hub
from vtoken_api.health import health
from vtoken_api.problems import ProblemError
from vtoken_api.state.journal import Journal
from vtoken_api.state.recorder import Recorder
from vtoken_api.state.statedir import StateDir
from vtoken_api.text import RequestTexts

LOOKUP_S = 1.0  # between two lookups of a change whose answer did not come

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; dry runs of readers are not audited. `change_id` names the change."""

    name: str
    can_control: bool = True
    change_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class Service:
    """One per server."""

    bus: EngineBus
    hub: Hub
    auth: AccessControl
    state: StateDir
    journal: Journal
    recorder: Recorder
    texts: RequestTexts
    model_name: str  # as vLLM's metrics name it
    _late: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.hub.complete = self.complete

    def start(self) -> None:
        """Start following and recording the engine."""
        self.hub.start()
        self.recorder.start()

    def health(self) -> list[wire.Health]:
        """The health of this process, part by part."""
        return health(self.hub, self.journal.audit, self.recorder)

    def complete(self, status: wire.Status) -> None:
        """Add the health of this process to a status; the engine supplies all other fields."""
        status.health = self.health()

    async def close(self) -> None:
        """Stop the background tasks and release the state directory; clients stay connected."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self.recorder.close()
        await self.hub.close()
        await self.journal.close()
        self.state.close()

    async def change(
        self, call: commands.PatchConfig | commands.Confirm | commands.Undo, caller: Caller
    ) -> wire.PatchResult:
        """Change the configuration, confirm or undo a change, or report what that would do."""
        result = await self._ask(call, wire.PatchResult, caller, dry_run=call.validate_only)
        await self._enter_change(call, result, caller)
        return result

    async def compact(self, call: commands.Compact, caller: Caller) -> wire.Operation:
        """Start a compaction, or only plan it (`dry_run`)."""
        operation = await self._ask(call, wire.Operation, caller, dry_run=call.dry_run)
        await self._enter_compaction(operation, caller)
        return operation

    async def forget(self, call: commands.Forget, caller: Caller) -> wire.Forgotten:
        """Let tokens of a request die first."""
        forgotten = await self._ask(call, wire.Forgotten, caller, dry_run=False)
        await self._enter_forget(call, forgotten, caller)
        return forgotten

    async def outcome(self, change_id: str) -> wire.Change:
        """What became of a change; raises ProblemError while the engine does not answer."""
        if self.bus.is_open(change_id):
            return wire.Change(id=change_id, state="pending")
        return await self.bus.ask(commands.Change(id=change_id), wire.Change)

    # ------------------------------------------------------------ inside

    async def _ask(
        self, call: commands.AnyCall, kind: type[T], caller: Caller, *, dry_run: bool
    ) -> T:
        change_id = None if dry_run else caller.change_id
        try:
            return await self.bus.ask(call, kind, caller.name, change_id)
        except ProblemError as error:
            if error.problem.change is not None:
                task = asyncio.create_task(self._enter_late(call, caller), name="vtoken-late")
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            raise

    async def _enter_late(self, call: commands.AnyCall, caller: Caller) -> None:
        """Add a call without an answer to the audit log, if the engine then says it applied it."""
        while self.bus.alive:
            await asyncio.sleep(LOOKUP_S)
            with contextlib.suppress(ProblemError):
                change = await self.outcome(caller.change_id)
                if change.result is not None:
                    await self._enter_change(call, change.result, caller)
                if change.operation is not None:
                    await self._enter_compaction(change.operation, caller)
                if change.forgotten is not None and isinstance(call, commands.Forget):
                    await self._enter_forget(call, change.forgotten, caller)
                return

    async def _enter_change(
        self, call: commands.AnyCall, result: wire.PatchResult, caller: Caller
    ) -> None:
        action = commands.name_of(type(call))
        if isinstance(call, commands.PatchConfig):
            action = "config" if result.trial is None else "trial"
        dry_run = result.outcome == "dry_run"
        await self._enter(caller, action, result.changes, result.revision, dry_run)

    async def _enter_compaction(self, operation: wire.Operation, caller: Caller) -> None:
        changes: dict[str, list[Any]] = {
            "operation": [None, operation.id],
            "request_id": [None, operation.request_id],
            "batch_size": [None, operation.batch_size],
        }
        await self._enter(caller, "compact", changes, operation.revision, operation.dry_run)

    async def _enter_forget(
        self, call: commands.Forget, forgotten: wire.Forgotten, caller: Caller
    ) -> None:
        changes: dict[str, list[Any]] = {
            "request_id": [None, call.request_id],
            "spans": [None, call.spans],
        }
        await self._enter(caller, "forget", changes, forgotten.revision, dry_run=False)

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
        entry = wire.AuditEntry(
            ts=time.time(),
            actor=caller.name,
            action=action,
            changes=changes,
            revision=revision,
            dry_run=dry_run,
        )
        self.journal.enter(entry)
        await self.journal.settle()
