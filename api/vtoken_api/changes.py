"""The changes that callers ask for: planned, noted, made on the engines, and entered.

1. A change is noted before the first engine is told, and until the audit log has its entry
   (`vtoken_api.state.pending`). A new owner completes what is noted before it makes changes.
2. An entry of a change has the change's id, so it is entered once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from vtoken import wire
from vtoken.wire import commands
from vtoken_api.engine import Engine
from vtoken_api.fleet import Fleet, NotMadeError, answer_of, together
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
from vtoken_api.state.journal import Journal
from vtoken_api.state.pending import Making, Pending

LOOKUP_S = 1.0  # between two lookups of a change whose answer did not come
RECENT_ENTRIES = 1000  # of the audit log, that a new owner looks through

Answer = wire.PatchResult | wire.Operation | wire.Forgotten | wire.Ended
A = TypeVar("A", wire.PatchResult, wire.Operation, wire.Forgotten, wire.Ended)
OfRequest = TypeVar("OfRequest", commands.Forget, commands.End)
KINDS: dict[type[commands.Call], type[Any]] = {
    commands.Compact: wire.Operation,
    commands.Forget: wire.Forgotten,
    commands.End: wire.Ended,
}  # of answers; the others' is PatchResult


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; dry runs of readers are not audited. `change_id` names the change.

    `again`: the call was given to an earlier owner, which may have handled it.
    """

    name: str
    can_control: bool = True
    change_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    again: bool = False


class Changes:
    """Makes the changes of one server; only the owner's are used.

    None is made before `complete_left`.
    """

    def __init__(self, fleet: Fleet, journal: Journal, pending: Pending) -> None:
        self._fleet = fleet
        self._journal = journal
        self._pending = pending
        self._late: set[asyncio.Task[None]] = set()
        self._completed = asyncio.Event()

    async def close(self) -> None:
        """Stop asking for answers that did not come."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    @property
    def num_late(self) -> int:
        """Changes whose answer did not come yet."""
        return len(self._late)

    async def configure(
        self,
        call: commands.PatchConfig | commands.Confirm | commands.Undo,
        rank: int | None,
        caller: Caller,
    ) -> wire.PatchResult:
        """Change the configuration, confirm or undo a change, or report what that would do."""
        patches = isinstance(call, commands.PatchConfig)
        action = "config" if patches else commands.name_of(type(call))
        planned = partial(self._fleet.plan_change, call, rank, caller.name)
        return await self._change(call, rank, caller, action, planned, wire.PatchResult)

    async def roll_out(
        self, call: commands.PatchConfig, first: int, caller: Caller
    ) -> wire.PatchResult:
        """Try a change on engine `first`; the others follow when it is kept there."""
        planned = partial(self._fleet.plan_canary, call, first, caller.name)
        result = await self._change(call, first, caller, "config", planned, wire.PatchResult)
        if result.trial is not None:
            others = ", ".join(map(str, result.trial.followers))
            result.notes.append(f"when the trial has ended well, it is made on engine {others}")
        return result

    async def sync(self, rank: int | None, caller: Caller, *, dry_run: bool) -> wire.PatchResult:
        """Give all engines one configuration, or report what that would do."""
        call = commands.PatchConfig(patch={}, validate_only=dry_run)
        planned = partial(self._fleet.plan_sync, rank, caller.name, dry_run=dry_run)
        return await self._change(call, None, caller, "sync", planned, wire.PatchResult)

    async def compact(
        self, call: commands.Compact, rank: int | None, caller: Caller
    ) -> wire.Operation:
        """Start a compaction, or only plan it (`dry_run`)."""
        planned = partial(self._fleet.plan_compaction, call, rank, caller.name)
        return await self._change(call, rank, caller, "compact", planned, wire.Operation)

    async def forget(
        self, call: commands.Forget, rank: int | None, caller: Caller
    ) -> wire.Forgotten:
        """Let tokens of a request die first."""
        planned = partial(self._of_request, call, rank)
        return await self._change(call, rank, caller, "forget", planned, wire.Forgotten)

    async def end(self, call: commands.End, rank: int | None, caller: Caller) -> wire.Ended:
        """End a session for its client."""
        planned = partial(self._of_request, call, rank)
        return await self._change(call, rank, caller, "end", planned, wire.Ended)

    async def _of_request(self, call: OfRequest, rank: int | None) -> dict[int, commands.AnyCall]:
        """`call` for the engine that has its request, by the engine's id of it."""
        engine, request_id = await self._fleet.holder(rank, call.request_id, running=True)
        return {engine.rank: structs.replace(call, request_id=request_id)}

    async def complete_left(self) -> None:
        """Make again what an earlier owner began. Other changes wait for it."""
        try:
            for making in await self._pending.left():
                logger.warning(
                    "vtoken: completing change %s of %s, whose API process ended",
                    making.change_id,
                    making.actor,
                )
                with contextlib.suppress(ProblemError):
                    async with self._fleet.changing():
                        await self._make(
                            making, KINDS.get(type(making.asked), wire.PatchResult), again=True
                        )
        except Exception:
            logger.exception("vtoken: cannot complete what an ended API process began")
        finally:
            self._completed.set()

    async def follow(self, rank: int, event: wire.Event) -> None:
        """Let the other engines follow one that has ended a trial. May be called again."""
        for other, call in self._fleet.plan_follow(rank, event).items():
            with contextlib.suppress(ProblemError):  # it has reverted by itself, or is gone
                await self._make_of_event("revert", rank, event, {other: call}, str(other))
        data = event.data
        if "followers" not in data:
            return
        revision = data.get("kept", data.get("confirmed"))
        problem = "its guards had no evidence" if data.get("unevaluated") else ""
        if not problem:
            patch = commands.PatchConfig(patch=data["patch"], revision=revision)
            calls: dict[int, commands.AnyCall] = dict.fromkeys(data["followers"], patch)
            try:
                await self._make_of_event("rollout", rank, event, calls)
            except ProblemError as error:
                problem = error.problem.detail
        if problem:
            logger.warning("vtoken: revision %d stays on no engine: %s", revision, problem)
            undo: dict[int, commands.AnyCall] = {rank: commands.Undo(if_match=revision)}
            with contextlib.suppress(ProblemError):
                await self._make_of_event("revert", rank, event, undo)

    # ------------------------------------------------------------ inside

    async def _change(
        self,
        call: commands.AnyCall,
        rank: int | None,
        caller: Caller,
        action: str,
        plan: Callable[[], Awaitable[A | dict[int, commands.AnyCall]]],
        kind: type[A],
    ) -> A:
        """Make what `plan` returns, or return it if it is the answer to a dry run."""
        await self._completed.wait()
        if caller.again:
            known = await self._known(rank, caller.change_id, kind)
            if known is not None:
                return known
        async with self._fleet.changing():
            planned = await plan()
            if not isinstance(planned, dict):
                if caller.can_control:
                    await self._enter(_entry(caller.name, action, call, planned, dry_run=True))
                return planned
            timeout_s = max(self._fleet.one(r).bus.timeout_s for r in planned)
            making = Making(
                change_id=caller.change_id,
                actor=caller.name,
                action=action,
                asked=call,
                calls=planned,
                expires_ts=time.time() + timeout_s,
            )
            await self._pending.begin(making)
            return await self._make(making, kind)

    async def _make(self, making: Making, kind: type[A], *, again: bool = False) -> A:
        """Make a change that is noted, enter it, and forget it. Raises NotMadeError.

        `again`: an earlier owner may have made it, and have entered it.
        """
        try:
            answer = await self._fleet.make(making, kind, again=again)
        except NotMadeError as error:
            if error.unsettled:
                self._later(self._settle(making, kind, error.unsettled))
            else:
                await self._pending.end(making.change_id)
            raise
        await self._enter_made(making, answer, again=again)
        if not self._journal.audit.error:  # otherwise the entry would be lost with this process
            await self._pending.end(making.change_id)
        return answer

    async def _settle(self, making: Making, kind: type[A], engines: Sequence[Engine]) -> None:
        """Ask engines whose answer did not come until it comes.

        What was told to one engine is entered if it was made; what was told to several is taken
        back.
        """
        for engine in engines:
            change = await self._learn(engine, making.change_id)
            if change is None:
                return
            if len(making.calls) == 1 and not making.part:
                with contextlib.suppress(ProblemError):
                    await self._enter_made(making, answer_of(change, kind), again=True)
            elif change.result is not None and change.result.changes:
                said = await self._fleet.take_back(making, engine, change.result)
                logger.warning("vtoken: change %s: %s", making.change_id, said)
        await self._pending.end(making.change_id)

    async def _learn(self, engine: Engine, change_id: str) -> wire.Change | None:
        """What became of a change on an engine; None if the engine dies."""
        while engine.bus.alive:
            await asyncio.sleep(LOOKUP_S)
            with contextlib.suppress(ProblemError):
                change = await self._fleet.outcome(engine.rank, change_id)
                if change.state != "pending":
                    return change
        return None

    async def _known(self, rank: int | None, change_id: str, kind: type[A]) -> A | None:
        """The answer to a change that engines have handled; None if it did not come to them."""
        change = await self._fleet.outcome(rank, change_id, peek=True)
        handled = [
            part for part in change.engines or [change] if part.state in ("applied", "refused")
        ]
        if not handled:
            return None
        handled.sort(key=lambda part: part.state != "refused")  # it was taken back elsewhere
        return together([answer_of(part, kind) for part in handled])

    async def _make_of_event(
        self,
        action: str,
        rank: int,
        event: wire.Event,
        calls: dict[int, commands.AnyCall],
        suffix: str = "",
    ) -> None:
        """Make what follows from an event of engine `rank`, once; raises ProblemError.

        What an earlier owner began and an engine has not answered yet is not waited for.
        """
        await self._completed.wait()
        making = Making(
            change_id=f"{action}-{rank}-{event.seq}" + (f"-{suffix}" if suffix else ""),
            actor=f"{event.data['actor']} of engine {rank}",
            action=action,
            asked=next(iter(calls.values())),
            calls=calls,
            expires_ts=time.time() + max(self._fleet.one(r).bus.timeout_s for r in calls),
            part=action == "rollout",
        )
        if making.change_id not in self._pending:
            await self._pending.begin(making)
            await self._make(making, wire.PatchResult, again=True)

    async def _enter_made(self, making: Making, answer: Answer, *, again: bool) -> None:
        change_id = making.change_id
        if again:
            page = await self._journal.entries(RECENT_ENTRIES)
            if any(entry.change == change_id for entry in page.entries):
                return
        entry = _entry(making.actor, making.action, making.asked, answer, dry_run=False)
        await self._enter(structs.replace(entry, change=change_id))

    async def _enter(self, entry: wire.AuditEntry) -> None:
        self._journal.enter(entry)
        await self._journal.settle()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="vtoken-late")
        self._late.add(task)
        task.add_done_callback(self._late.discard)


def _entry(
    actor: str, action: str, call: commands.AnyCall, answer: Answer, *, dry_run: bool
) -> wire.AuditEntry:
    """The entry of an accepted call; `answer.engine` None: it was made on all."""
    changes: dict[str, list[Any]]
    if isinstance(answer, wire.PatchResult):
        changes = answer.changes
        if action == "config" and answer.trial is not None:
            action = "trial"
    elif isinstance(answer, wire.Operation):
        named = {
            "operation": answer.id,
            "request_id": answer.request_id,
            "batch_size": answer.batch_size,
        }
        changes = {name: [None, value] for name, value in named.items() if value is not None}
    elif isinstance(answer, wire.Ended):
        changes = {"request_id": [None, answer.request_id]}
    else:
        assert isinstance(call, commands.Forget)
        changes = {"request_id": [None, answer.request_id], "spans": [None, call.spans]}
    return wire.AuditEntry(
        ts=time.time(),
        actor=actor,
        action=action,
        changes=changes,
        revision=answer.revision,
        dry_run=dry_run,
        engine=answer.engine,
    )
