"""The changes that callers ask for: planned, made on the engines, and entered.

A change is over when every engine that was told has answered or died. Its caller waits for that as
long as an engine may begin it, and is told then that the outcome is not known yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from vtoken import wire
from vtoken.wire import commands
from vtoken_api.bus import unavailable
from vtoken_api.fleet import Fleet, Making
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.state.journal import Journal

Answer = wire.PatchResult | wire.Operation | wire.Forgotten | wire.Ended
A = TypeVar("A", wire.PatchResult, wire.Operation, wire.Forgotten, wire.Ended)
OfRequest = TypeVar("OfRequest", commands.Forget, commands.End)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; dry runs of readers are not audited. `change_id` names the change."""

    name: str
    can_control: bool = True
    change_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Changes:
    """Makes the changes of one server."""

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._fleet = fleet
        self._journal = journal
        self._open: dict[str, asyncio.Task[Any]] = {}  # by the id of the change

    async def close(self) -> None:
        """Stop waiting for answers that did not come."""
        for task in self._open.values():
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def outcome(self, rank: int | None, change_id: str) -> wire.Change:
        """What became of a change; raises ProblemError while an engine does not answer."""
        if change_id in self._open:
            return wire.Change(id=change_id, state="pending")
        return await self._fleet.outcome(rank, change_id)

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
        return await self._change(call, caller, action, planned, wire.PatchResult)

    async def roll_out(
        self, call: commands.PatchConfig, first: int, caller: Caller
    ) -> wire.PatchResult:
        """Try a change on engine `first`; the others follow when it is kept there."""
        planned = partial(self._fleet.plan_canary, call, first, caller.name)
        result = await self._change(call, caller, "config", planned, wire.PatchResult)
        if result.trial is not None:
            others = ", ".join(map(str, result.trial.followers))
            result.notes.append(f"when the trial has ended well, it is made on engine {others}")
        return result

    async def sync(self, rank: int | None, caller: Caller, *, dry_run: bool) -> wire.PatchResult:
        """Give all engines one configuration, or report what that would do."""
        call = commands.PatchConfig(patch={}, validate_only=dry_run)
        planned = partial(self._fleet.plan_sync, rank, caller.name, dry_run=dry_run)
        return await self._change(call, caller, "sync", planned, wire.PatchResult)

    async def compact(
        self, call: commands.Compact, rank: int | None, caller: Caller
    ) -> wire.Operation:
        """Start a compaction, or only plan it (`dry_run`)."""
        planned = partial(self._fleet.plan_compaction, call, rank, caller.name)
        return await self._change(call, caller, "compact", planned, wire.Operation)

    async def forget(
        self, call: commands.Forget, rank: int | None, caller: Caller
    ) -> wire.Forgotten:
        """Let tokens of a request die first."""
        planned = partial(self._of_request, call, rank)
        return await self._change(call, caller, "forget", planned, wire.Forgotten)

    async def end(self, call: commands.End, rank: int | None, caller: Caller) -> wire.Ended:
        """End a session for its client."""
        planned = partial(self._of_request, call, rank)
        return await self._change(call, caller, "end", planned, wire.Ended)

    async def _of_request(self, call: OfRequest, rank: int | None) -> dict[int, commands.AnyCall]:
        """`call` for the engine that has its request, by the engine's id of it."""
        engine, request_id = await self._fleet.holder(rank, call.request_id, running=True)
        return {engine.rank: structs.replace(call, request_id=request_id)}

    async def follow(self, rank: int, event: wire.Event) -> None:
        """Let the other engines follow one that has ended a trial."""
        for other, call in self._fleet.plan_follow(rank, event).items():
            with contextlib.suppress(ProblemError):  # it has reverted by itself, or is gone
                await self._make_of_event("revert", rank, event, {other: call})
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
        caller: Caller,
        action: str,
        plan: Callable[[], Awaitable[A | dict[int, commands.AnyCall]]],
        kind: type[A],
    ) -> A:
        """Make what `plan` returns, or return it if it is the answer to a dry run.

        Raises 409 while another change of this id is open, and 503 if the outcome is not known yet.
        """
        async with self._fleet.changing():
            planned = await plan()
            if not isinstance(planned, dict):
                if caller.can_control:
                    await self._enter(_entry(caller.name, action, call, planned, dry_run=True))
                return planned
            if caller.change_id in self._open:
                raise _handled(caller.change_id)
            timeout_s = max(self._fleet.one(rank).bus.timeout_s for rank in planned)
            making = Making(
                caller.change_id, caller.name, action, call, planned, time.time() + timeout_s
            )
            task = asyncio.create_task(self._make(making, kind), name="vtoken-change")
            self._open[making.change_id] = task
            task.add_done_callback(partial(self._ended, making.change_id))
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if not done:
                raise _late(making, timeout_s)
            return task.result()

    def _ended(self, change_id: str, task: asyncio.Task[Any]) -> None:
        del self._open[change_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ProblemError):
            logger.error("vtoken: change %s failed", change_id, exc_info=error)

    async def _make(self, making: Making, kind: type[A]) -> A:
        """Make a change and enter it; raises ProblemError."""
        answer = await self._fleet.make(making, kind)
        entry = _entry(making.actor, making.action, making.asked, answer, dry_run=False)
        await self._enter(structs.replace(entry, change=making.change_id))
        return answer

    async def _make_of_event(
        self, action: str, rank: int, event: wire.Event, calls: dict[int, commands.AnyCall]
    ) -> None:
        """Make what follows from an event of engine `rank`; raises ProblemError."""
        making = Making(
            uuid.uuid4().hex,
            f"{event.data['actor']} of engine {rank}",
            action,
            next(iter(calls.values())),
            calls,
            time.time() + max(self._fleet.one(told).bus.timeout_s for told in calls),
        )
        await self._make(making, wire.PatchResult)

    async def _enter(self, entry: wire.AuditEntry) -> None:
        self._journal.enter(entry)
        await self._journal.settle()


def _late(making: Making, timeout_s: float) -> ProblemError:
    call = commands.name_of(type(making.asked))
    error = unavailable(
        f"the engine did not answer {call!r} within {timeout_s:g} s; the change was applied by now "
        f"or never will be: GET /vtoken/v1/changes/{making.change_id} tells which as soon as the "
        "engine answers"
    )
    error.problem.title, error.problem.change = "Outcome unknown", making.change_id
    return error


def _handled(change_id: str) -> ProblemError:
    return refuse(
        409,
        f"the change {change_id!r} is under way; GET /vtoken/v1/changes/{change_id} tells what "
        "becomes of it",
        title="Handled already",
        field="X-VToken-Change",
        value=change_id,
        bound="a new id for every change",
    )


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
