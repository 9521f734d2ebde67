"""All engines of this server: which ones a call means, and what they answer.

With data parallelism a server has several engines, which vLLM balances. Each has its own
configuration, revisions and trials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from vtoken import wire
from vtoken.base.errors import UnknownRequestError
from vtoken.wire import commands
from vtoken.wire.request_names import NamedRequest, best, the_one
from vtoken_api.bus import EngineBus
from vtoken_api.combined import together
from vtoken_api.problems import ProblemError, refuse

T = TypeVar("T")


class Fleet:
    """The `engines` of a server, in the order of their ranks, as one asks them."""

    def __init__(self, engines: Sequence[EngineBus]) -> None:
        self.engines = engines
        self.ranks = [engine.rank for engine in engines]

    # ------------------------------------------------------------ which engines

    def named(self, rank: int | None) -> Sequence[EngineBus]:
        """The engine of this rank, or all; raises 422."""
        return self.engines if rank is None else [self.one(rank)]

    def one(self, rank: int | None) -> EngineBus:
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
    ) -> tuple[EngineBus, T]:
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
    ) -> tuple[EngineBus, str]:
        """The engine of the request that a client means by `name`, and what to call it there.

        `running`: as in `the_one`. Of one engine, the engine itself finds the request. Raises
        RefusedError, and the problem of an engine that does not answer unless another has it.
        """
        engines = self.named(rank)
        if len(engines) == 1:
            return engines[0], name
        ask = commands.Find(name=name)
        answers = await self.ask_each(dict.fromkeys(self.ranks, ask), list[NamedRequest])
        holders: dict[str, EngineBus] = {}
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
        return max(engine.timeout_s for engine in self.engines)

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
                return await self.one(rank).ask(call, kind, actor, change_id, expires_ts)
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

    async def operation(self, rank: int | None, operation_id: str) -> wire.Operation:
        """The state of a compaction of one engine or, of several, of all together."""
        found = [
            await self.find(rank, commands.Operation(id=part), wire.Operation)
            for part in operation_id.split("+")[: len(self.engines)]
        ]
        return together([operation for _, operation in found])
