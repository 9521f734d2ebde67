"""All engines of this server: which ones a call means, what they answer, and how they differ.

With data parallelism a server has several engines, which vLLM balances. Each has its own
configuration, revisions and trials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from vtoken import sentences, wire
from vtoken.base.errors import UnknownRequestError
from vtoken.wire import commands
from vtoken.wire.fleet import differences
from vtoken.wire.request_names import NamedRequest, best, the_one
from vtoken_api import combined
from vtoken_api.engine import Engine
from vtoken_api.problems import ProblemError, refuse

T = TypeVar("T")


class Fleet:
    """The `engines` of a server, in the order of their ranks."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.ranks = [engine.rank for engine in engines]

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
        answers = await self.ask_each({engine.rank: call for engine in engines}, kind)
        problems = []
        for engine in engines:
            answer = answers[engine.rank]
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
        answers = await self.ask_each(dict.fromkeys(self.ranks, ask), list[NamedRequest])
        holders: dict[str, Engine] = {}
        found: list[NamedRequest] = []
        problems = []
        for engine in engines:
            answer = answers[engine.rank]
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

    # ------------------------------------------------------------ asking

    @property
    def timeout_s(self) -> float:
        """The longest that an engine takes to begin a call."""
        return max(engine.bus.timeout_s for engine in self.engines)

    async def ask_each(
        self,
        calls: Mapping[int, commands.AnyCall],
        kind: type[T],
        actor: str = "local",
        change_id: str | None = None,
        expires_ts: float | None = None,
    ) -> dict[int, T | ProblemError]:
        """Ask engines at once, each by its rank; each one's answer or problem. Other errors are
        raised. The rest as in `EngineBus.ask`.
        """

        async def one(rank: int, call: commands.AnyCall) -> T | ProblemError:
            try:
                return await self.one(rank).bus.ask(call, kind, actor, change_id, expires_ts)
            except ProblemError as error:
                return error

        answers = await asyncio.gather(*(one(rank, call) for rank, call in calls.items()))
        return dict(zip(calls, answers, strict=True))

    async def ask_all(
        self, calls: Mapping[int, commands.AnyCall], kind: type[T], actor: str = "local"
    ) -> dict[int, T]:
        """As `ask_each`, but raises the first problem, which names its engine."""
        found: dict[int, T] = {}
        for rank, answer in (await self.ask_each(calls, kind, actor)).items():
            if isinstance(answer, ProblemError):
                if len(self.engines) > 1:
                    answer.problem.detail = f"engine {rank}: {answer.problem.detail}"
                raise answer
            found[rank] = answer
        return found

    # ------------------------------------------------------------ reading

    async def document(self) -> wire.Fleet:
        """Every engine with its state now, or the newest known if it does not answer."""
        status, config = commands.Status(), commands.Config()
        statuses, configs = await asyncio.gather(
            self.ask_each(dict.fromkeys(self.ranks, status), wire.Status),
            self.ask_each(dict.fromkeys(self.ranks, config), wire.ConfigDocument),
        )
        rows = []
        known: dict[int, wire.ConfigDocument] = {}
        for engine in self.engines:
            rank, state = engine.rank, engine.hub.state
            row = wire.EngineRow(engine=rank, status=None)
            found, its_config = statuses[rank], configs[rank]
            if isinstance(found, wire.Status) and isinstance(its_config, wire.ConfigDocument):
                engine.complete(found)
                row.status, known[rank] = found, its_config
            else:
                problem = found if isinstance(found, ProblemError) else its_config
                assert isinstance(problem, ProblemError)
                row.problem = problem.problem.detail
                row.silent_s = engine.hub.state_age_s or 0.0
                if state is not None and state.config is not None:
                    row.status, known[rank] = state.status, state.config
            if rank in known:
                row.revision, row.made = known[rank].revision, known[rank].made
            rows.append(row)
        drifts = differences(known)
        for row in rows:
            row.drift = drifts.get(row.engine, {})
        return wire.Fleet(
            revision=max(row.revision for row in rows),
            engines=rows,
            sentence=sentences.fleet_sentence(rows),
            ok=not any(row.problem or row.drift for row in rows),
        )

    async def operation(self, rank: int | None, operation_id: str) -> wire.Operation:
        """The state of a compaction of one engine or, of several, of all together."""
        found = [
            await self.find(rank, commands.Operation(id=part), wire.Operation)
            for part in operation_id.split("+")[: len(self.engines)]
        ]
        return combined.together([operation for _, operation in found])
