"""The service behind routes and stream: engines, journal and access control."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vtoken import wire
from vtoken.wire import commands
from vtoken_api.auth.check import AccessControl
from vtoken_api.fleet import Fleet
from vtoken_api.problems import ProblemError
from vtoken_api.state.journal import Journal
from vtoken_api.state.statedir import StateDir
from vtoken_api.text import RequestTexts

LOOKUP_S = 1.0  # between two lookups of a change whose answer did not come


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; dry runs of readers are not audited. `change_id` names the change."""

    name: str
    can_control: bool = True
    change_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class Service:
    """One per server process."""

    fleet: Fleet
    auth: AccessControl
    state: StateDir
    journal: Journal
    texts: RequestTexts
    model_name: str  # as vLLM's metrics name it
    _late: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def start(self) -> None:
        """Start following and recording the engines."""
        for engine in self.fleet.engines:
            engine.recorder.on_action = partial(self._follow, engine.rank)
            engine.start()

    async def close(self) -> None:
        """Stop the background tasks and release the state directory; clients stay connected."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self.fleet.close()
        for engine in self.fleet.engines:
            await engine.close()
        await self.journal.close()
        self.state.close()

    async def change(
        self,
        call: commands.PatchConfig | commands.Confirm | commands.Undo,
        rank: int | None,
        caller: Caller,
    ) -> wire.PatchResult:
        """Change the configuration, confirm or undo a change, or report what that would do."""
        with self._entered_late(call, rank, caller):
            result = await self.fleet.change(call, rank, caller.name, caller.change_id)
        await self._enter_change(call, result, caller)
        return result

    async def sync(self, rank: int | None, caller: Caller, *, dry_run: bool) -> wire.PatchResult:
        """Give all engines one configuration, or report what that would do."""
        result = await self.fleet.sync(rank, caller.name, caller.change_id, dry_run=dry_run)
        await self._enter(
            caller, "sync", result.changes, result.revision, dry_run, engine=result.engine
        )
        return result

    async def compact(
        self, call: commands.Compact, rank: int | None, caller: Caller
    ) -> wire.Operation:
        """Start a compaction, or only plan it (`dry_run`)."""
        change_id = None if call.dry_run else caller.change_id
        with self._entered_late(call, rank, caller):
            operation = await self.fleet.compact(call, rank, caller.name, change_id)
        await self._enter_compaction(operation, caller)
        return operation

    async def forget(
        self, call: commands.Forget, rank: int | None, caller: Caller
    ) -> wire.Forgotten:
        """Let tokens of a request die first."""
        engine = self.fleet.engines[0]
        if len(self.fleet.engines) > 1:
            ask = commands.Request(id=call.request_id)
            engine, _ = await self.fleet.find(rank, ask, wire.RequestDetail)
        with self._entered_late(call, engine.rank, caller):
            forgotten = await engine.bus.ask(call, wire.Forgotten, caller.name, caller.change_id)
        await self._enter_forget(call, forgotten, caller)
        return forgotten

    # ------------------------------------------------------------ inside

    @contextlib.contextmanager
    def _entered_late(
        self, call: commands.AnyCall, rank: int | None, caller: Caller
    ) -> Iterator[None]:
        """Add a call without an answer to the audit log later, if it was made on its one engine.

        One of several engines whose answer did not come takes the change back.
        """
        try:
            yield
        except ProblemError as error:
            if error.problem.change is not None and len(self.fleet.named(rank)) == 1:
                late = self._enter_late(call, rank, caller)
                task = asyncio.create_task(late, name="vtoken-late")
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            raise

    async def _enter_late(self, call: commands.AnyCall, rank: int | None, caller: Caller) -> None:
        engine = self.fleet.one(rank)
        while engine.bus.alive:
            await asyncio.sleep(LOOKUP_S)
            with contextlib.suppress(ProblemError):
                change = await self.fleet.outcome(engine.rank, caller.change_id)
                if change.result is not None:
                    await self._enter_change(call, change.result, caller)
                if change.operation is not None:
                    await self._enter_compaction(change.operation, caller)
                if change.forgotten is not None and isinstance(call, commands.Forget):
                    await self._enter_forget(call, change.forgotten, caller)
                return

    async def _follow(self, rank: int, event: wire.Event) -> None:
        """Revert on the other engines what one has reverted, and enter that."""
        for other, result in await self.fleet.follow(rank, event):
            actor = f"{event.data['actor']} of engine {rank}"
            await self._enter(
                Caller(actor), "revert", result.changes, result.revision, False, engine=other
            )

    async def _enter_change(
        self, call: commands.AnyCall, result: wire.PatchResult, caller: Caller
    ) -> None:
        action = commands.name_of(type(call))
        if isinstance(call, commands.PatchConfig):
            action = "config" if result.trial is None else "trial"
        dry_run = result.outcome == "dry_run"
        await self._enter(
            caller, action, result.changes, result.revision, dry_run, engine=result.engine
        )

    async def _enter_compaction(self, operation: wire.Operation, caller: Caller) -> None:
        changes: dict[str, list[Any]] = {
            "operation": [None, operation.id],
            "request_id": [None, operation.request_id],
            "batch_size": [None, operation.batch_size],
        }
        await self._enter(
            caller,
            "compact",
            changes,
            operation.revision,
            operation.dry_run,
            engine=operation.engine,
        )

    async def _enter_forget(
        self, call: commands.Forget, forgotten: wire.Forgotten, caller: Caller
    ) -> None:
        changes: dict[str, list[Any]] = {
            "request_id": [None, call.request_id],
            "spans": [None, call.spans],
        }
        await self._enter(
            caller, "forget", changes, forgotten.revision, False, engine=forgotten.engine
        )

    async def _enter(
        self,
        caller: Caller,
        action: str,
        changes: dict[str, list[Any]],
        revision: int,
        dry_run: bool,
        engine: int | None,
    ) -> None:
        """Add an accepted call to the audit log; `engine` None: it was made on all."""
        if dry_run and not caller.can_control:
            return
        entry = wire.AuditEntry(
            ts=time.time(),
            actor=caller.name,
            action=action,
            changes=changes,
            revision=revision,
            dry_run=dry_run,
            engine=engine,
        )
        self.journal.enter(entry)
        await self.journal.settle()
