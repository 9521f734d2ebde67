"""All engines of this server, and the changes that several of them make together.

With data parallelism a server has several engines, which vLLM balances. Each has its own
configuration, revisions and trials; a call without `engine` changes all of them.

1. A change together has one new number: the highest revision of any engine, plus 1. So an engine
   with a lower one has missed something, and a number names one change.
2. It is tried on every engine first (`validate_only`). If one refuses, nothing is changed.
3. If an engine fails in spite of that, the change is taken back where it was made.
4. Each engine guards its own part of a trial. When one reverts, the others do.
5. A change with a canary engine is tried there alone. If it is kept, the others make it under the
   same number. If they do not, it is taken back on the first.

Every engine is told which revision it must be at, so that nothing changes between trying and
making.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import structs

from vtoken import sentences, wire
from vtoken.base.errors import UnknownRequestError
from vtoken.wire import commands
from vtoken.wire.fleet import common, differences
from vtoken.wire.request_names import NamedRequest, best, the_one
from vtoken_api.engine import Engine
from vtoken_api.problems import ProblemError, refuse

ConfigCall = commands.PatchConfig | commands.Undo | commands.Confirm
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Making:
    """A change as it is made: what each engine is told, on whose behalf, and until when.

    `action`: its name in the audit log; `asked`: the caller's own call.
    """

    change_id: str
    actor: str
    action: str
    asked: commands.AnyCall
    calls: dict[int, commands.AnyCall]  # by the rank of the engine
    expires_ts: float  # an engine that gets it later refuses it


class Fleet:
    """The `engines` of a server, in the order of their ranks."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._changing = asyncio.Lock()

    @property
    def ranks(self) -> list[int]:
        return [engine.rank for engine in self.engines]

    def changing(self) -> contextlib.AbstractAsyncContextManager[None]:
        """One change of several engines at a time."""
        return self._changing if len(self.engines) > 1 else contextlib.nullcontext()

    # ------------------------------------------------------------ which engines

    def named(self, rank: int | None) -> Sequence[Engine]:
        """The engine of this rank, or all; raises 422."""
        return self.engines if rank is None else [self.one(rank)]

    def one(self, rank: int | None) -> Engine:
        """The engine of this rank; None: the only one. Raises 422."""
        if rank is None and len(self.engines) == 1:
            return self.engines[0]
        for engine in self.engines:
            if engine.rank == rank:
                return engine
        why = f"no engine {rank}" if rank is not None else "this server has several engines"
        ranks = ", ".join(map(str, self.ranks))
        bound = f"{ranks}; see GET /vtoken/v1/engines"
        raise refuse(422, why, field="engine", value=rank, bound=bound)

    async def find(
        self, rank: int | None, call: commands.AnyCall, kind: type[T]
    ) -> tuple[Engine, T]:
        """The engine that knows what `call` asks for, and its answer.

        Raises the problem of an engine that does not answer, else the 404 of one that does not
        know it.
        """
        engines = self.named(rank)
        answers = await _each(engines, lambda engine: engine.bus.ask(call, kind))
        problems = []
        for engine, answer in zip(engines, answers, strict=True):
            if not isinstance(answer, ProblemError):
                return engine, answer
            problems.append(answer)
        raise max(problems, key=lambda error: (error.problem.status != 404, error.problem.status))

    async def holder(
        self, rank: int | None, name: str, *, running: bool = False
    ) -> tuple[Engine, str]:
        """The engine of the request that a client means by `name`, and what to call it there.

        `running`: as in `the_one`. Of one engine, the engine itself finds the request. Raises
        RefusedError, and the problem of an engine that does not answer unless another has it.
        """
        engines = self.named(rank)
        if len(engines) == 1:
            return engines[0], name
        ask = commands.Find(name=name)
        answers = await _each(engines, lambda e: e.bus.ask(ask, list[NamedRequest]))
        holders: dict[str, Engine] = {}
        found: list[NamedRequest] = []
        problems = []
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ProblemError):
                problems.append(answer)
                continue
            found += answer
            holders |= dict.fromkeys([one.id for one in answer], engine)
        try:
            request_id = the_one(best(found), name, running=running)
        except UnknownRequestError:
            if problems:
                raise problems[0] from None
            raise
        return holders[request_id], request_id

    # ------------------------------------------------------------ reading

    async def document(self) -> wire.Fleet:
        """Every engine with its state now, or the newest known if it does not answer."""

        async def ask(engine: Engine) -> tuple[wire.Status, wire.ConfigDocument]:
            status = await engine.bus.ask(commands.Status(), wire.Status)
            engine.complete(status)
            return status, await engine.bus.ask(commands.Config(), wire.ConfigDocument)

        rows, configs = [], {}
        answers = await _each(self.engines, ask)
        for engine, answer in zip(self.engines, answers, strict=True):
            row = wire.EngineRow(engine=engine.rank, status=None)
            config: wire.ConfigDocument | None = None
            if not isinstance(answer, ProblemError):
                row.status, config = answer
            else:
                row.problem = answer.problem.detail
                row.silent_s = engine.hub.view_age_s or 0.0
                if (known := engine.hub.view) is not None:
                    row.status, config = known.status, known.config
            if config is not None:
                row.revision, row.made = config.revision, config.made
                configs[engine.rank] = config
            rows.append(row)
        drifts = differences(configs)
        for row in rows:
            row.drift = drifts.get(row.engine, {})
        return wire.Fleet(
            revision=max(row.revision for row in rows),
            engines=rows,
            sentence=sentences.fleet_sentence(rows),
            ok=not any(row.problem or row.drift for row in rows),
        )

    # ------------------------------------------------------------ changing

    async def plan_change(
        self, call: ConfigCall, rank: int | None, actor: str
    ) -> wire.PatchResult | dict[int, commands.AnyCall]:
        """What each engine is to be told, by rank, or what the change would do (a dry run).

        Until it is made, `changing` is held if there are several engines.
        """
        engines = self.named(rank)
        if len(self.engines) == 1:
            if call.validate_only:
                return await engines[0].bus.ask(call, wire.PatchResult, actor)
            return {engines[0].rank: call}
        previews = await self._try(call, engines, actor)
        if isinstance(call, commands.Undo):
            _require_same(engines, previews)
        if call.validate_only:
            return _together(previews)
        number = await self._next_number()
        calls: dict[int, commands.AnyCall] = {}
        for engine, preview in zip(engines, previews, strict=True):
            own: ConfigCall = structs.replace(call, if_match=preview.revision)
            if not isinstance(own, commands.Confirm):
                own = structs.replace(own, revision=number)
            if isinstance(own, commands.PatchConfig):
                own = structs.replace(own, engines=[e.rank for e in engines])
            calls[engine.rank] = own
        return calls

    async def plan_canary(
        self, call: commands.PatchConfig, rank: int, actor: str
    ) -> wire.PatchResult | dict[int, commands.AnyCall]:
        """As `plan_change`: a trial on one engine, which all others follow when it has ended well.

        Raises 422 without a guard, and on a server with one engine.
        """
        first = self.one(rank)
        if len(self.engines) == 1:
            raise _no_canary(rank, "this server has one engine", "a server with several engines")
        if not call.guards:
            why = "nothing would decide whether the other engines follow"
            raise _no_canary(rank, why, "with guards, such as preemptions>0")
        previews = await self._try(call, self.engines, actor)
        if call.validate_only:
            return _together(previews)
        at = dict(zip(self.ranks, previews, strict=True))[first.rank].revision
        others = [r for r in self.ranks if r != first.rank]
        number = await self._next_number()
        return {first.rank: structs.replace(call, if_match=at, revision=number, followers=others)}

    async def _try(
        self, call: ConfigCall, engines: Sequence[Engine], actor: str
    ) -> list[wire.PatchResult]:
        """What the change would do on each engine; raises the first refusal, and 412."""
        tried = structs.replace(call, validate_only=True, if_match=None)
        previews = await self._all(engines, lambda e: e.bus.ask(tried, wire.PatchResult, actor))
        newest = max([preview.revision for preview in previews], default=0)
        if call.if_match not in (None, newest):
            raise _stale(call.if_match, newest)
        return previews

    async def _next_number(self) -> int:
        """Of the next change: above the newest revision of every engine that answers."""
        ask = commands.Config()
        found = await _each(self.engines, lambda e: e.bus.ask(ask, wire.ConfigDocument))
        return 1 + max(c.revision for c in found if not isinstance(c, ProblemError))

    async def plan_sync(
        self, rank: int | None, actor: str, *, dry_run: bool
    ) -> wire.PatchResult | dict[int, commands.AnyCall]:
        """As `plan_change`: all engines get the configuration of engine `rank`; None: the one that
        most have. Raises 409 if they have it.
        """
        ask = commands.Config()
        configs = await self._all(self.engines, lambda e: e.bus.ask(ask, wire.ConfigDocument))
        by_rank = dict(zip(self.ranks, configs, strict=True))
        wanted = common(by_rank) if rank is None else by_rank[self.one(rank).rank].desired
        assert wanted is not None
        number = 1 + max(config.revision for config in configs)
        calls: dict[int, commands.PatchConfig] = {}
        for r, config in by_rank.items():
            differs = wire.config_changes(config.desired, wanted)
            if differs:
                calls[r] = commands.PatchConfig(
                    patch={name: new for name, (_, new) in differs.items()},
                    if_match=config.revision,
                    validate_only=dry_run,
                    revision=number,
                )
        if not calls:
            raise refuse(409, "all engines have the same configuration", field="engine")
        if not dry_run:
            return {**calls}
        differing = [engine for engine in self.engines if engine.rank in calls]

        def preview(engine: Engine) -> Awaitable[wire.PatchResult]:
            return engine.bus.ask(calls[engine.rank], wire.PatchResult, actor)

        return _together(await self._all(differing, preview))

    async def make(self, making: Making, kind: type[T]) -> T:
        """Tell the engines, and wait for all of them; the answers as one. Raises ProblemError."""
        engines = [self.one(rank) for rank in making.calls]

        def tell(engine: Engine) -> Awaitable[T]:
            call = making.calls[engine.rank]
            return engine.bus.ask(call, kind, making.actor, making.change_id, making.expires_ts)

        answers = await _each(engines, tell)
        failed: list[tuple[Engine, ProblemError]] = []
        made: list[tuple[Engine, T]] = []
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ProblemError):
                failed.append((engine, answer))
            else:
                made.append((engine, answer))
        if not failed:
            return together([answer for _, answer in made])
        _, worst = failed[0]
        if len(self.engines) > 1:
            detail = [f"engine {e.rank}: {error.problem.detail}" for e, error in failed]
            for engine, answer in made:
                if isinstance(answer, wire.PatchResult) and answer.changes:
                    detail.append(await self.take_back(making, engine, answer))
            worst.problem.detail = "; ".join(detail)
        raise worst

    async def take_back(self, making: Making, engine: Engine, result: wire.PatchResult) -> str:
        """Restore what one engine had before `result`; a sentence that says so, or why not."""
        back: ConfigCall = commands.Undo(if_match=result.revision)
        if isinstance(making.asked, commands.Undo):
            patch = {name: old for name, (old, _) in result.changes.items()}
            back = commands.PatchConfig(patch=patch, if_match=result.revision)
        try:
            await engine.bus.ask(back, wire.PatchResult, making.actor)
        except ProblemError as error:
            return f"engine {engine.rank} keeps it: {error.problem.detail}"
        return f"taken back on engine {engine.rank}"

    def plan_follow(self, rank: int, event: wire.Event) -> dict[int, commands.AnyCall]:
        """What the others are told, by rank, when engine `rank` has reverted their common trial."""
        reverted, data = event.data.get("reverted"), event.data
        if reverted is None:
            return {}
        others = [r for r in self.ranks if r != rank and r in data.get("engines", ())]
        return {r: commands.Undo(if_match=reverted, revision=data["revision"]) for r in others}

    # ------------------------------------------------------------ compactions

    async def plan_compaction(
        self, call: commands.Compact, rank: int | None, actor: str
    ) -> wire.Operation | dict[int, commands.AnyCall]:
        """As `plan_change`, for one request, one engine or all."""
        engines = self.named(rank)
        if call.request_id is not None and len(engines) > 1:
            holder, request_id = await self.holder(None, call.request_id, running=True)
            engines, call = [holder], structs.replace(call, request_id=request_id)
        if not call.dry_run:
            return {engine.rank: call for engine in engines}
        return _operation(
            await self._all(engines, lambda e: e.bus.ask(call, wire.Operation, actor))
        )

    async def operation(self, rank: int | None, operation_id: str) -> wire.Operation:
        """The state of a compaction of one engine or, of several, of all together."""
        found = [
            await self.find(rank, commands.Operation(id=part), wire.Operation)
            for part in operation_id.split("+")[: len(self.engines)]
        ]
        return _operation([operation for _, operation in found])

    async def outcome(self, rank: int | None, change_id: str) -> wire.Change:
        """What became of a change; raises ProblemError while an engine does not answer."""
        ask = commands.Change(id=change_id)
        changes = await self._all(self.named(rank), lambda e: e.bus.ask(ask, wire.Change))
        if len(changes) == 1:
            return changes[0]
        order = ("applied", "pending", "refused", "not_applied")
        first = min(changes, key=lambda change: order.index(change.state))
        return structs.replace(first, engines=changes)

    # ------------------------------------------------------------ inside

    async def _all(
        self, engines: Sequence[Engine], ask: Callable[[Engine], Awaitable[T]]
    ) -> list[T]:
        """Every engine's answer; raises the first problem, which names its engine."""
        answers = await _each(engines, ask)
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ProblemError):
                if len(self.engines) > 1:
                    answer.problem.detail = f"engine {engine.rank}: {answer.problem.detail}"
                raise answer
        return [answer for answer in answers if not isinstance(answer, ProblemError)]


async def _each(
    engines: Iterable[Engine], ask: Callable[[Engine], Awaitable[T]]
) -> list[T | ProblemError]:
    """Ask all at once; each one's answer or problem. Other errors are raised."""

    async def one(engine: Engine) -> T | ProblemError:
        try:
            return await ask(engine)
        except ProblemError as error:
            return error

    return list(await asyncio.gather(*map(one, engines)))


def _stale(expected: int | None, newest: int) -> ProblemError:
    return refuse(
        412,
        f"the configuration is at revision {newest}, the call was made for {expected}",
        title="Refused",
        field="If-Match",
        value=expected,
        bound=f"{newest}",
    )


def _no_canary(rank: int, why: str, bound: str) -> ProblemError:
    return refuse(422, why, field="canary_engine", value=rank, bound=bound)


def _require_same(engines: Sequence[Engine], previews: Sequence[wire.PatchResult]) -> None:
    """Raises 409 unless an undo restores the same configuration on all engines."""
    if any(preview.changes != previews[0].changes for preview in previews):
        would = "; ".join(
            f"engine {engine.rank}: {sentences.change_text(preview.changes) or 'nothing'}"
            for engine, preview in zip(engines, previews, strict=True)
        )
        raise refuse(
            409,
            f"the engines would undo different changes: {would}",
            field="engine",
            bound="name one engine, or give all one configuration with POST /vtoken/v1/sync",
        )


def _together(results: Sequence[wire.PatchResult]) -> wire.PatchResult:
    """The answers of several engines as one, which keeps theirs."""
    if len(results) == 1:
        return results[0]
    first = next((result for result in results if result.changes), results[0])
    found = [result.what_if for result in results if result.what_if is not None]
    waits = any(result.outcome == "accepted" for result in results)
    return structs.replace(
        first,
        engine=None,
        revision=max(result.revision for result in results),
        outcome="accepted" if waits else first.outcome,
        what_if=_sum(found) if found else None,
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
        engines=list(results),
    )


def together(answers: Sequence[T]) -> T:
    """The answers of several engines to one call, as one."""
    parts: Any = list(answers)
    first = parts[0]
    if isinstance(first, wire.PatchResult):
        parts = [_together(parts)]
    elif isinstance(first, wire.Operation):
        parts = [_operation(parts)]
    combined: T = parts[0]
    return combined


def _sum(effects: Sequence[wire.WhatIf]) -> wire.WhatIf:
    """The effects of a change on several engines, added up."""
    total = structs.replace(effects[0])
    for effect in effects[1:]:
        for name, value in structs.asdict(effect).items():
            mine = getattr(total, name)
            if isinstance(value, int) and isinstance(mine, int):
                setattr(total, name, mine + value)
            elif isinstance(value, wire.WhatIf) and isinstance(mine, wire.WhatIf):
                setattr(total, name, _sum([mine, value]))
            elif mine is None:
                setattr(total, name, value)
    return total


def _operation(parts: Sequence[wire.Operation]) -> wire.Operation:
    """The compactions of several engines as one, which keeps theirs."""
    if len(parts) == 1:
        return parts[0]
    order = ("failed", "cancelled", "running", "pending", "done")
    plans = [part.plan for part in parts if part.plan is not None]
    results = [part.result for part in parts if part.result is not None]
    return structs.replace(
        parts[0],
        id="+".join(part.id for part in parts),
        state=min((part.state for part in parts), key=order.index),
        engine=None,
        plan=_added(plans) if plans else None,
        result=_added(results) if results else None,
        error="; ".join(f"engine {p.engine}: {p.error}" for p in parts if p.error) or None,
        engines=list(parts),
    )


Sums = TypeVar("Sums", wire.OperationPlan, wire.OperationResult)


def _added(parts: Sequence[Sums]) -> Sums:
    """Counts added up; a duration is the longest."""
    total = structs.replace(parts[0])
    for part in parts[1:]:
        for name, value in structs.asdict(part).items():
            mine = getattr(total, name)
            if name == "duration_ms":
                setattr(total, name, max(mine, value))
            elif isinstance(value, int):
                setattr(total, name, mine + value)
            elif mine is None:
                setattr(total, name, value)
    return total
