"""This process among the API processes of one server: whether it is the owner, and how it asks it.

One process owns what the server has once: audit log, flight recordings, rate limits, changes under
way. It answers every call, wherever the call came in. The others keep their streams.

1. The owner holds a lock in the folder that the processes share. The kernel takes it back when the
   process ends, and the next one that asks gets it.
2. While there is no owner, calls wait, at most HANDOVER_S.
3. A call whose owner ended before the first piece of its answer's body came is asked again, marked
   as such. A change has an id from the first time on, so it is not made twice.
4. An owner that is asked to end, as by SIGTERM, resigns before it has served its last client.
5. An answer that has begun is not begun anew: the client's connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs
from starlette.types import Message, Receive, Send

from vtoken import wire
from vtoken_api.auth.check import SAFE_METHODS, AccessCheck
from vtoken_api.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse
from vtoken_api.processes.door import Door
from vtoken_api.processes.figures import FigureFiles, Figures
from vtoken_api.processes.messages import (
    AGAIN,
    Admission,
    Call,
    Head,
    HealthAnswer,
    HealthQuestion,
    Line,
    Piece,
    Question,
    Scope,
    Scrape,
    Verdict,
    replay,
)
from vtoken_api.state.lock import FileLock

LOCK_NAME = "owner.lock"
SOCKET_NAME = "owner"
TICK_S = 0.25  # between two looks at the lock
PAUSE_S = 0.05  # between two attempts to reach an owner
HANDOVER_S = 15.0
ANSWER_S = 60.0  # the longest that an answer takes to begin, with the first piece of its body
RETRY_S = 5.0  # after an error of this process
HEALTH_S = 1.0  # between two questions for the owner's health
CHANGE_HEADER = b"x-vtoken-change"

T = TypeVar("T")


class OwnerLostError(Exception):
    """The owner ended, perhaps after it had handled the question."""


@dataclass(frozen=True, slots=True)
class Duties:
    """What a process does as the owner. `figures`: what it counts itself, owner or not."""

    own: Callable[[], Awaitable[None]]  # begins
    resign: Callable[[], Awaitable[None]]  # ends
    is_ending: Callable[[], bool]  # whether this process is asked to end
    metrics: Callable[[], Awaitable[bytes]]
    health: Callable[[], dict[int, list[wire.Health]]]  # of audit log and recorders
    figures: Callable[[], Figures]


class Member:
    """`start` once, inside the event loop.

    `owns`: whether this process is the owner. `told_health`: else the owner's, by engine.
    """

    def __init__(self, folder: Path, check: AccessCheck, duties: Duties) -> None:
        self.owns = False
        self.told_health: Mapping[int, list[wire.Health]] = {}
        self._files = FigureFiles(folder)
        self._socket = folder / SOCKET_NAME
        self._check = check
        self._duties = duties
        self._lock = FileLock(folder / LOCK_NAME)
        self._door = Door(self._socket, check, duties.metrics, duties.health)
        self._taking = asyncio.Lock()
        self._next_health = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Become the owner if there is none, and go on trying in the background."""
        await self._take_over()
        self._task = asyncio.create_task(self._run(), name="vtoken-member")

    async def close(self) -> None:
        """Stop answering others; `leave` afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._door.close()

    def leave(self) -> None:
        """Let another process own what this one owned."""
        self._files.close()
        self._lock.release()

    def figures(self) -> Figures:
        """The sum over all API processes."""
        return self._duties.figures().plus(self._files.others())

    # ------------------------------------------------------------ asking the owner

    async def answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Have the owner answer a call; as the owner, answer it here. Raises ProblemError 503."""
        call = await _call_of(scope, receive)
        if call is None:
            return
        begun = False

        async def ask(line: Line) -> None:
            nonlocal begun
            await line.send(call)
            async with asyncio.timeout(ANSWER_S):
                head: Head = await line.receive(Head)
                piece: Piece = await line.receive(Piece)
            begun = True
            await send({"type": "http.response.start", **structs.asdict(head)})
            await send(_body(piece))
            while piece.more:
                piece = await line.receive(Piece)
                await send(_body(piece))

        async def here() -> None:
            own = {**scope, "headers": call.scope.headers, AGAIN: call.again}
            await self._check(own, replay(call, receive), send)

        while True:
            try:
                await self._reach(ask, here)
                return
            except OwnerLostError:
                if begun:
                    raise
                call.again = True

    async def admit(self, scope: dict[str, Any]) -> None:
        """Raises the owner's ProblemError if a websocket may not be opened."""

        async def here() -> Verdict:
            return Verdict(None)  # its own check follows

        verdict = await self._ask(Admission(Scope.of(scope)), here, Verdict)
        if verdict.problem is not None:
            raise ProblemError(verdict.problem, verdict.headers)

    async def metrics(self) -> bytes:
        """vToken's metrics; raises ProblemError 503."""
        self._files.write(self._duties.figures())

        async def here() -> Piece:
            return Piece(await self._duties.metrics())

        return (await self._ask(Scrape(), here, Piece)).data

    async def _ask(self, question: Question, here: Callable[[], Awaitable[T]], kind: type[T]) -> T:
        """The answer to a question that changes nothing; raises ProblemError 503."""

        async def ask(line: Line) -> T:
            await line.send(question)
            async with asyncio.timeout(ANSWER_S):
                return await line.receive(kind)

        while True:
            with contextlib.suppress(OwnerLostError):
                return await self._reach(ask, here)

    async def _reach(
        self, ask: Callable[[Line], Awaitable[T]], here: Callable[[], Awaitable[T]]
    ) -> T:
        """`ask` the owner, or do it `here` as the owner.

        Raises OwnerLostError, and ProblemError 503 if there is no owner or it does not answer.
        """
        deadline = time.monotonic() + HANDOVER_S
        while not self.owns:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket)
            except OSError:
                await self._take_over()
                if self._duties.is_ending():
                    raise _no_answer("this server, or this API process of it, ends") from None
                if time.monotonic() >= deadline:
                    raise _no_answer("no API process answers for the others") from None
                await asyncio.sleep(0.0 if self.owns else PAUSE_S)
                continue
            line = Line(reader, writer)
            try:
                return await ask(line)
            except TimeoutError as error:  # an OSError too
                why = f"the API process that answers for the others is silent for {ANSWER_S:g} s"
                raise _no_answer(why) from error
            except (OSError, asyncio.IncompleteReadError) as error:
                raise OwnerLostError from error
            finally:
                line.close()
        return await here()

    # ------------------------------------------------------------ inside

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._duties.is_ending():
                    await self._resign()
                await self._take_over()
                self._files.write(self._duties.figures())
                await self._keep_health()
            except Exception:
                logger.exception("vtoken: an API process cannot follow the others; retrying")
                await asyncio.sleep(RETRY_S)

    async def _take_over(self) -> None:
        async with self._taking:
            if self.owns or self._duties.is_ending():
                return
            with contextlib.suppress(FileNotFoundError):  # the server ends
                if self._lock.acquire():
                    await self._door.open()
                    await self._duties.own()
                    await self._door.serve()
                    self.owns = True
                    logger.info("vtoken: this API process answers for all of this server")

    async def _resign(self) -> None:
        async with self._taking:
            if self.owns:
                self.owns = False
                await self._door.close()
                await self._duties.resign()
                self._lock.release()

    async def _keep_health(self) -> None:
        now = time.monotonic()
        if self.owns or now < self._next_health:
            return
        self._next_health = now + HEALTH_S

        async def ask(line: Line) -> HealthAnswer:
            await line.send(HealthQuestion())
            async with asyncio.timeout(HEALTH_S):
                return await line.receive(HealthAnswer)

        async def here() -> HealthAnswer:
            return HealthAnswer({})

        try:
            self.told_health = (await self._reach(ask, here)).engines
        except (OwnerLostError, ProblemError):
            silent = [
                wire.Health(name=name, ok=False, detail="the API process that has it is silent")
                for name in ("audit", "recorder")
            ]
            self.told_health = dict.fromkeys(self.told_health, silent)


def _body(piece: Piece) -> Message:
    return {"type": "http.response.body", "body": piece.data, "more_body": piece.more}


def _no_answer(detail: str) -> ProblemError:
    return refuse(503, detail, title="No answer", headers={"Retry-After": "1"})


async def _call_of(scope: dict[str, Any], receive: Receive) -> Call | None:
    """The call in `scope`, with its body as far as the owner reads it; None if the client left.

    A change gets an id, unless its caller gave one.
    """
    call = Call(Scope.of(scope))
    if scope["method"] in SAFE_METHODS:
        return call
    if all(name.lower() != CHANGE_HEADER for name, _ in call.scope.headers):
        call.scope.headers.append((CHANGE_HEADER, uuid.uuid4().hex.encode()))
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more and len(body) <= MAX_BODY_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        call.stalled = True
    call.body = bytes(body)
    return call
