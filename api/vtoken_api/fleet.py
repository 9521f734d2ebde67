"""All engines of this server, and the changes that several of them make together.

With data parallelism a server has several engines, which vLLM balances. Each has its own
configuration, revisions and trials; a call without `engine` changes all of them.

1. A change together has one new number: the highest revision of any engine, plus 1. So an engine
   with a lower one has missed something, and a number names one change.
2. It is tried on every engine first (`validate_only`). If one refuses, nothing is changed.
3. If an engine fails in spite of that, the change is taken back where it was made. An engine whose
   answer did not come is asked again until it answers, and the change is taken back there too.
4. Each engine guards its own part of a trial. When one reverts, the others do.

Revisions that several API processes give out at once cannot collide: every engine is told which
revision it must be at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from vtoken import sentences, wire
from vtoken.wire import commands
from vtoken.wire.fleet import common
from vtoken_api.engine import Engine
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse

RETRY_S = 1.0  # between two questions to an engine that did not answer

ConfigCall = commands.PatchConfig | commands.Undo | commands.Confirm
T = TypeVar("T")


class Fleet:
    """The `engines` of a server, in the order of their ranks."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._changing = asyncio.Lock()
        self._late: set[asyncio.Task[None]] = set()

    @property
    def ranks(self) -> list[int]:
        return [engine.rank for engine in self.engines]

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

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
                row.revision = config.revision
                configs[engine.rank] = config
            rows.append(row)
        usual = common(configs)
        for row in rows:
            if usual is not None and row.engine in configs:
                row.drift = wire.config_changes(configs[row.engine].desired, usual)
        return wire.Fleet(
            revision=max(row.revision for row in rows),
            engines=rows,
            sentence=sentences.fleet_sentence(rows),
            ok=not any(row.problem or row.drift for row in rows),
        )

    # ------------------------------------------------------------ changing

    async def change(
        self, call: ConfigCall, rank: int | None, actor: str, change_id: str
    ) -> wire.PatchResult:
        """Change the configuration of one engine or of all, or report what that would do."""
        engines = self.named(rank)
        if len(self.engines) == 1:
            named = None if call.validate_only else change_id
            return await engines[0].bus.ask(call, wire.PatchResult, actor, named)
        async with self._changing:
            tried = structs.replace(call, validate_only=True, if_match=None)
            previews = await self._all(engines, lambda e: e.bus.ask(tried, wire.PatchResult, actor))
            newest = max([preview.revision for preview in previews], default=0)
            if call.if_match not in (None, newest):
                raise _stale(call.if_match, newest)
            if isinstance(call, commands.Undo):
                _require_same(engines, previews)
            if call.validate_only:
                return _together(previews)
            number = 1 + max([newest, *await self._revisions()])
            return await self._change(call, engines, previews, number, actor, change_id)

    async def _revisions(self) -> list[int]:
        """The newest revision of every engine that answers."""
        ask = commands.Config()
        found = await _each(self.engines, lambda e: e.bus.ask(ask, wire.ConfigDocument))
        return [config.revision for config in found if not isinstance(config, ProblemError)]

    async def _change(
        self,
        call: ConfigCall,
        engines: Sequence[Engine],
        previews: Sequence[wire.PatchResult],
        number: int,
        actor: str,
        change_id: str,
    ) -> wire.PatchResult:
        at = {e.rank: preview.revision for e, preview in zip(engines, previews, strict=True)}

        async def make(engine: Engine) -> wire.PatchResult:
            own: ConfigCall = structs.replace(call, if_match=at[engine.rank])
            if not isinstance(own, commands.Confirm):
                own = structs.replace(own, revision=number)
            if isinstance(own, commands.PatchConfig):
                own = structs.replace(own, engines=[e.rank for e in engines])
            return await engine.bus.ask(own, wire.PatchResult, actor, change_id)

        answers = await _each(engines, make)
        made: dict[int, wire.PatchResult] = {}
        failed: list[tuple[Engine, ProblemError]] = []
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ProblemError):
                failed.append((engine, answer))
            else:
                made[engine.rank] = answer
        if not failed:
            return _together(list(made.values()))
        detail = [f"engine {engine.rank}: {error.problem.detail}" for engine, error in failed]
        changed = [e for e in engines if e.rank in made and made[e.rank].changes]
        for engine in changed:
            said = await self._take_back(call, engine, made[engine.rank], actor)
            detail.append(said)
        for engine, error in failed:
            if error.problem.change is not None:
                self._later(self._settle(call, engine, change_id, actor))
        _, worst = failed[0]
        worst.problem.detail = "; ".join(detail)
        raise worst

    async def _take_back(
        self, call: ConfigCall, engine: Engine, result: wire.PatchResult, actor: str
    ) -> str:
        """Restore what one engine had before `result`; a sentence that says so, or why not."""
        back: ConfigCall = commands.Undo(if_match=result.revision)
        if isinstance(call, commands.Undo):
            patch = {name: old for name, (old, _) in result.changes.items()}
            back = commands.PatchConfig(patch=patch, if_match=result.revision)
        try:
            await engine.bus.ask(back, wire.PatchResult, actor)
        except ProblemError as error:
            return f"engine {engine.rank} keeps it: {error.problem.detail}"
        return f"taken back on engine {engine.rank}"

    async def _settle(self, call: ConfigCall, engine: Engine, change_id: str, actor: str) -> None:
        """Take the change back on an engine that answers too late, if it made it."""
        while engine.bus.alive:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(ProblemError):
                change = await engine.bus.ask(commands.Change(id=change_id), wire.Change)
                if change.result is not None and change.result.changes:
                    said = await self._take_back(call, engine, change.result, actor)
                    logger.warning("vtoken: change %s: %s", change_id, said)
                return

    async def follow(self, rank: int, event: wire.Event) -> list[tuple[int, wire.PatchResult]]:
        """Revert on the others what engine `rank` has reverted; each that did, with its answer."""
        reverted, data = event.data.get("reverted"), event.data
        others = [e for e in self.engines if e.rank != rank and e.rank in data.get("engines", ())]
        if reverted is None or not others:
            return []
        undo = commands.Undo(if_match=reverted, revision=data["revision"])
        actor = f"{data['actor']} of engine {rank}"
        answers = await _each(others, lambda e: e.bus.ask(undo, wire.PatchResult, actor))
        return [
            (engine.rank, answer)
            for engine, answer in zip(others, answers, strict=True)
            if not isinstance(answer, ProblemError)  # it has reverted by itself, or is gone
        ]

    async def sync(
        self, rank: int | None, actor: str, change_id: str, *, dry_run: bool
    ) -> wire.PatchResult:
        """Give all engines the configuration of engine `rank`; None: the one that most have."""
        async with self._changing:
            ask = commands.Config()
            configs = await self._all(self.engines, lambda e: e.bus.ask(ask, wire.ConfigDocument))
            by_rank = dict(zip(self.ranks, configs, strict=True))
            wanted = common(by_rank) if rank is None else by_rank[self.one(rank).rank].desired
            assert wanted is not None
            number = 1 + max(config.revision for config in configs)
            patches = {
                r: {
                    name: new
                    for name, (_, new) in wire.config_changes(config.desired, wanted).items()
                }
                for r, config in by_rank.items()
            }

            async def make(engine: Engine) -> wire.PatchResult:
                call = commands.PatchConfig(
                    patch=patches[engine.rank],
                    if_match=by_rank[engine.rank].revision,
                    validate_only=dry_run,
                    revision=number,
                )
                named = None if dry_run else change_id
                return await engine.bus.ask(call, wire.PatchResult, actor, named)

            differing = [engine for engine in self.engines if patches[engine.rank]]
            if not differing:
                raise refuse(409, "all engines have the same configuration", field="engine")
            return _together(await self._all(differing, make))

    # ------------------------------------------------------------ compactions

    async def compact(
        self, call: commands.Compact, rank: int | None, actor: str, change_id: str | None
    ) -> wire.Operation:
        """Compact one request, one engine or all, or report what that would do."""
        engines = self.named(rank)
        if call.request_id is not None and len(engines) > 1:
            holder, _ = await self.find(
                None, commands.Request(id=call.request_id), wire.RequestDetail
            )
            engines = [holder]
        return _operation(
            await self._all(engines, lambda e: e.bus.ask(call, wire.Operation, actor, change_id))
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
        engines = self.named(rank)
        if any(engine.bus.is_open(change_id) for engine in engines):
            return wire.Change(id=change_id, state="pending")
        ask = commands.Change(id=change_id)
        changes = await self._all(engines, lambda e: e.bus.ask(ask, wire.Change))
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

    def _later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)


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


def _sum(effects: Sequence[wire.WhatIf]) -> wire.WhatIf:
    """The effects of a change on several engines, added up."""
    total = structs.replace(effects[0])
    for effect in effects[1:]:
        for name, value in structs.asdict(effect).items():
            mine = getattr(total, name)
            if isinstance(value, int) and isinstance(mine, int):
                setattr(total, name, mine + value)
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
