"""The changes that callers ask for: planned, made on the engines, and entered.

A call without `engine` changes all engines of the server, or none:

1. A change together has one new number: the highest revision of any engine, plus 1. So an engine
   with a lower one has missed something, and a number names one change.
2. Every engine is asked first whether it would accept it (`commands.Validate`). If one refuses,
   nothing is changed. Then every engine is told, and at which revision it must be.
3. If an engine fails in spite of that, the change is taken back where it was made.
4. Each engine guards its own part of a trial. When one reverts, the others do.
5. A change with a canary engine is tried there alone. If it is kept, the others make it under the
   same number. If they do not, it is taken back on the first.

A change is over when every engine that was told has answered or died. Its caller waits for that as
long as an engine may begin it, and is told then that the outcome is not known yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from vtoken import sentences, wire
from vtoken.base.errors import StaleRevisionError
from vtoken.wire import commands
from vtoken.wire.fleet import common
from vtoken_api.bus import EngineBus, unavailable
from vtoken_api.combined import together
from vtoken_api.fleet import Fleet
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.state.journal import Journal

Answer = wire.PatchResult | wire.Operation | wire.Forgotten | wire.Ended | wire.Restored
OfRequest = commands.Forget | commands.End | commands.Restore
T = TypeVar("T")
A = TypeVar("A", bound=Answer)
Found = TypeVar("Found", wire.Accepted, wire.PatchResult)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling; dry runs of readers are not audited. `change_id` names the change."""

    name: str
    can_control: bool = True
    change_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Making:
    """A change as it is made: what each engine is told, by its rank, and on whose behalf.

    `action`: its name in the audit log; `asked`: the caller's own call.
    """

    caller: Caller
    action: str
    asked: commands.AnyCall
    calls: Mapping[int, commands.AnyCall]


class Changes:
    """Makes the changes of one server."""

    def __init__(self, fleet: Fleet, journal: Journal) -> None:
        self._fleet = fleet
        self._journal = journal
        self._changing = asyncio.Lock()  # one change of several engines at a time
        self._open: dict[str, asyncio.Task[Any]] = {}  # by the id of the change

    async def close(self) -> None:
        """Stop waiting for answers that did not come."""
        for task in self._open.values():
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    # ------------------------------------------------------------ the configuration

    async def configure(
        self, call: commands.ConfigCall, rank: int | None, caller: Caller, *, dry_run: bool = False
    ) -> wire.PatchResult:
        """Change the configuration, confirm or undo a change, or report what that would do."""
        action = (
            "config" if isinstance(call, commands.PatchConfig) else commands.name_of(type(call))
        )
        engines = self._fleet.named(rank)
        if dry_run:
            return await self._preview(call, engines, caller, action)
        if len(self._fleet.engines) == 1:
            return await self._make(
                Making(caller, action, call, {engines[0].rank: call}), wire.PatchResult
            )
        async with self._changing:
            accepted = await self._ask(engines, call, commands.Validate, wire.Accepted)
            number = 1 + max(await self._revisions(accepted))
            if not isinstance(call, commands.Confirm):
                call = structs.replace(call, revision=number)
            if isinstance(call, commands.PatchConfig):
                call = structs.replace(call, engines=[*accepted])
            calls = {r: structs.replace(call, if_match=its.revision) for r, its in accepted.items()}
            return await self._make(Making(caller, action, call, calls), wire.PatchResult)

    async def roll_out(
        self, call: commands.PatchConfig, first: int, caller: Caller, *, dry_run: bool = False
    ) -> wire.PatchResult:
        """Try a change on engine `first`; the others follow when it is kept there.

        Raises 422 without a guard, and on a server with one engine.
        """
        fleet = self._fleet
        rank = fleet.one(first).rank
        if len(fleet.engines) == 1:
            raise _no_canary(rank, "this server has one engine", "a server with several engines")
        if not call.guards:
            why = "nothing would decide whether the other engines follow"
            raise _no_canary(rank, why, "with guards, such as preemptions>0")
        if dry_run:
            return await self._preview(call, fleet.engines, caller, "config")
        others = [other for other in fleet.ranks if other != rank]
        async with self._changing:
            accepted = await self._ask(fleet.engines, call, commands.Validate, wire.Accepted)
            number = 1 + max(await self._revisions(accepted))
            told = structs.replace(
                call, if_match=accepted[rank].revision, revision=number, followers=others
            )
            making = Making(caller, "config", call, {rank: told})
            result = await self._make(making, wire.PatchResult)
        if result.trial is not None:
            follow = ", ".join(map(str, others))
            result.notes.append(f"when the trial has ended well, it is made on engine {follow}")
        return result

    async def sync(self, rank: int | None, caller: Caller, *, dry_run: bool) -> wire.PatchResult:
        """Give all engines the configuration of engine `rank`, or report what that would do.

        None: the one that most have. Raises 409 if they have it.
        """
        fleet = self._fleet
        async with self._changing:
            ask = dict.fromkeys(fleet.ranks, commands.Config())
            configs = await fleet.ask_all(ask, wire.ConfigDocument)
            wanted = common(configs) if rank is None else configs[fleet.one(rank).rank].desired
            assert wanted is not None
            number = 1 + max(config.revision for config in configs.values())
            patches = {
                r: commands.PatchConfig(
                    patch={name: new for name, (_, new) in differs.items()},
                    if_match=config.revision,
                    revision=number,
                )
                for r, config in configs.items()
                if (differs := wire.config_changes(config.desired, wanted))
            }
            if not patches:
                raise refuse(409, "all engines have the same configuration", field="engine")
            asked = commands.PatchConfig(patch={})
            if not dry_run:
                return await self._make(Making(caller, "sync", asked, patches), wire.PatchResult)
            previews = {r: commands.Preview(change=patch) for r, patch in patches.items()}
            found = await fleet.ask_all(previews, wire.PatchResult)
            return await self._previewed(found, caller, "sync", asked)

    # ------------------------------------------------------------ compactions and requests

    async def compact(
        self, call: commands.Compact, rank: int | None, caller: Caller
    ) -> wire.Operation:
        """Start a compaction of one request, one engine or all, or only plan it (`dry_run`)."""
        engines = self._fleet.named(rank)
        if call.request_id is not None and len(engines) > 1:
            holder, request_id = await self._fleet.holder(None, call.request_id, running=True)
            engines, call = [holder], structs.replace(call, request_id=request_id)
        calls = {engine.rank: call for engine in engines}
        if call.dry_run:
            found = await self._fleet.ask_all(calls, wire.Operation, caller.name)
            return await self._previewed(found, caller, "compact", call)
        return await self._make(Making(caller, "compact", call, calls), wire.Operation)

    async def of_request(
        self, call: OfRequest, rank: int | None, caller: Caller, kind: type[A]
    ) -> A:
        """Let tokens of a request die first or come back, or end a session; the engine answers with
        a `kind`.
        """
        engine, request_id = await self._fleet.holder(rank, call.request_id, running=True)
        calls = {engine.rank: structs.replace(call, request_id=request_id)}
        action = commands.name_of(type(call))
        if isinstance(call, commands.Restore) and call.dry_run:
            found = await self._fleet.ask_all(calls, kind, caller.name)
            return await self._previewed(found, caller, action, call)
        return await self._make(Making(caller, action, call, calls), kind)

    # ------------------------------------------------------------ what became of it

    async def outcome(self, rank: int | None, change_id: str) -> wire.Change:
        """What became of a change; raises ProblemError while an engine does not answer."""
        if change_id in self._open:
            return wire.Change(id=change_id, state="pending")
        ask = commands.Change(id=change_id)
        calls = {engine.rank: ask for engine in self._fleet.named(rank)}
        changes = [*(await self._fleet.ask_all(calls, wire.Change)).values()]
        if len(changes) == 1:
            return changes[0]
        order = ("applied", "pending", "refused", "not_applied")
        first = min(changes, key=lambda change: order.index(change.state))
        return structs.replace(first, engines=changes)

    def follow(self, rank: int, end: wire.TrialEnd) -> None:
        """Let the other engines follow engine `rank`, in the background."""
        self._start(uuid.uuid4().hex, self._follow(rank, end))

    async def _follow(self, rank: int, end: wire.TrialEnd) -> None:
        caller = Caller(f"{end.actor} of engine {rank}")
        if end.reverted is not None:
            undo = commands.Undo(if_match=end.reverted, revision=end.revision)
            for other in end.engines:
                if other != rank:
                    revert = Making(caller, "revert", undo, {other: undo})
                    with contextlib.suppress(ProblemError):  # it has reverted by itself, or is gone
                        await self._tell(revert, wire.PatchResult)
        elif end.followers:
            problem = "its guards had no evidence" if end.unevaluated else ""
            revision = end.kept if end.kept is not None else end.confirmed
            if not problem:
                patch = commands.PatchConfig(patch=end.patch, revision=revision)
                rollout = Making(caller, "rollout", patch, dict.fromkeys(end.followers, patch))
                try:
                    await self._tell(rollout, wire.PatchResult)
                except ProblemError as error:
                    problem = error.problem.detail
            if problem:
                logger.warning("vtoken: revision %s stays on no engine: %s", revision, problem)
                undo = commands.Undo(if_match=revision)
                revert = Making(caller, "revert", undo, {rank: undo})
                with contextlib.suppress(ProblemError):
                    await self._tell(revert, wire.PatchResult)

    # ------------------------------------------------------------ asking

    async def _ask(
        self,
        engines: Sequence[EngineBus],
        call: commands.ConfigCall,
        question: type[commands.Validate | commands.Preview],
        kind: type[Found],
    ) -> dict[int, Found]:
        """What the engines answer to a `question` about a change, by rank. Raises the first
        refusal, 412 if it is for an older revision, and 409 if they would undo different ones.
        """
        ask = question(change=structs.replace(call, if_match=None))
        found = await self._fleet.ask_all({engine.rank: ask for engine in engines}, kind)
        _require_newest(call.if_match, [its.revision for its in found.values()])
        if isinstance(call, commands.Undo):
            _require_same({rank: its.changes for rank, its in found.items()})
        return found

    async def _revisions(self, accepted: Mapping[int, wire.Accepted]) -> list[int]:
        """The revisions of these engines, and of all others that answer."""
        ask = commands.Config()
        others = {rank: ask for rank in self._fleet.ranks if rank not in accepted}
        found = await self._fleet.ask_each(others, wire.ConfigDocument)
        revisions = [c.revision for c in found.values() if not isinstance(c, ProblemError)]
        return [*revisions, *(its.revision for its in accepted.values())]

    async def _preview(
        self, call: commands.ConfigCall, engines: Sequence[EngineBus], caller: Caller, action: str
    ) -> wire.PatchResult:
        """What a change would do on engines; raises the first refusal, and 412."""
        found = await self._ask(engines, call, commands.Preview, wire.PatchResult)
        return await self._previewed(found, caller, action, call)

    async def _previewed(
        self, found: Mapping[int, A], caller: Caller, action: str, call: commands.AnyCall
    ) -> A:
        """The answers to a dry run as one, which is entered if its caller could make the change."""
        answer = together([*found.values()])
        if caller.can_control:
            await self._enter(_entry(caller, action, call, answer, dry_run=True))
        return answer

    # ------------------------------------------------------------ making

    async def _make(self, making: Making, kind: type[A]) -> A:
        """Make a change and enter it. Raises ProblemError: also 409 while another change of this
        id is open, and 503 if the outcome is not known in time.
        """
        change_id = making.caller.change_id
        if change_id in self._open:
            raise _handled(change_id)
        timeout_s = self._fleet.timeout_s
        task = self._start(change_id, self._tell(making, kind))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise _late(making, timeout_s)
        return task.result()

    def _start(self, change_id: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._open[change_id] = asyncio.create_task(work, name="vtoken-change")
        task.add_done_callback(partial(self._ended, change_id))
        return task

    def _ended(self, change_id: str, task: asyncio.Task[Any]) -> None:
        del self._open[change_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ProblemError):
            logger.error("vtoken: change %s failed", change_id, exc_info=error)

    async def _tell(self, making: Making, kind: type[A]) -> A:
        """Tell the engines, wait for all of them, and enter their answer. Raises ProblemError."""
        caller, fleet = making.caller, self._fleet
        answers = await fleet.ask_each(
            making.calls, kind, caller.name, caller.change_id, time.time() + fleet.timeout_s
        )
        failed = {r: answer for r, answer in answers.items() if isinstance(answer, ProblemError)}
        made = {r: answer for r, answer in answers.items() if not isinstance(answer, ProblemError)}
        if failed:
            error = next(iter(failed.values()))
            if len(fleet.engines) > 1:
                said = [f"engine {rank}: {e.problem.detail}" for rank, e in failed.items()]
                for rank, answer in made.items():
                    if isinstance(answer, wire.PatchResult) and answer.changes:
                        said.append(await self._take_back(making, rank, answer))
                error.problem.detail = "; ".join(said)
            raise error
        answer = together([*made.values()])
        entry = _entry(caller, making.action, making.asked, answer, dry_run=False)
        await self._enter(structs.replace(entry, change=caller.change_id))
        return answer

    async def _take_back(self, making: Making, rank: int, result: wire.PatchResult) -> str:
        """Restore what one engine had before `result`; a sentence that says so, or why not."""
        back: commands.ConfigCall = commands.Undo(if_match=result.revision)
        if isinstance(making.asked, commands.Undo):
            patch = {name: old for name, (old, _) in result.changes.items()}
            back = commands.PatchConfig(patch=patch, if_match=result.revision)
        try:
            await self._fleet.one(rank).ask(back, wire.PatchResult, making.caller.name)
        except ProblemError as error:
            return f"engine {rank} keeps it: {error.problem.detail}"
        return f"taken back on engine {rank}"

    async def _enter(self, entry: wire.AuditEntry) -> None:
        self._journal.enter(entry)
        await self._journal.settle()


def _require_newest(expected: int | None, revisions: Sequence[int]) -> None:
    """Raises 412 unless `expected` is None or the highest of the engines' revisions."""
    newest = max(revisions)
    if expected is not None and expected != newest:
        raise StaleRevisionError(expected, newest)


def _require_same(changes: Mapping[int, dict[str, list[Any]]]) -> None:
    """Raises 409 unless an undo restores the same configuration on all engines, by rank."""
    first, *others = changes.values()
    if any(other != first for other in others):
        would = "; ".join(
            f"engine {rank}: {sentences.change_text(its) or 'nothing'}"
            for rank, its in changes.items()
        )
        raise refuse(
            409,
            f"the engines would undo different changes: {would}",
            field="engine",
            bound="name one engine, or give all one configuration with POST /vtoken/v1/sync",
        )


def _no_canary(rank: int, why: str, bound: str) -> ProblemError:
    return refuse(422, why, field="canary_engine", value=rank, bound=bound)


def _late(making: Making, timeout_s: float) -> ProblemError:
    call, change_id = commands.name_of(type(making.asked)), making.caller.change_id
    error = unavailable(
        f"the engine did not answer {call!r} within {timeout_s:g} s; the change was applied by now "
        f"or never will be: GET /vtoken/v1/changes/{change_id} tells which as soon as the engine "
        "answers"
    )
    error.problem.title, error.problem.change = "Outcome unknown", change_id
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
    caller: Caller, action: str, call: commands.AnyCall, answer: Answer, *, dry_run: bool
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
    elif isinstance(answer, wire.Restored):
        named = {"request_id": answer.request_id, "tokens": answer.restorable_tokens}
        changes = {name: [None, value] for name, value in named.items()}
    else:
        assert isinstance(call, commands.Forget)
        changes = {"request_id": [None, answer.request_id], "spans": [None, call.spans]}
    return wire.AuditEntry(
        ts=time.time(),
        actor=caller.name,
        action=action,
        changes=changes,
        revision=answer.revision,
        dry_run=dry_run,
        engine=answer.engine,
    )
