"""The owner's end: answers calls that reached other API processes, as if they had come here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import assert_never

from starlette.types import Message

from vtoken import wire
from vtoken_api.auth.check import AccessCheck
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError
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
    Scrape,
    Verdict,
    replay,
)


class Door:
    """A Unix socket at `path`. `metrics` and `health` answer for this process as the owner."""

    def __init__(
        self,
        path: Path,
        check: AccessCheck,
        metrics: Callable[[], Awaitable[bytes]],
        health: Callable[[], dict[int, list[wire.Health]]],
    ) -> None:
        self._path = path
        self._check = check
        self._metrics = metrics
        self._health = health
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take the place of an owner that has ended; `serve` answers. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._connected, self._path, start_serving=False
        )

    async def serve(self) -> None:
        assert self._server is not None
        await self._server.start_serving()

    async def close(self) -> None:
        """Stop answering; calls that are being answered end without an answer."""
        if self._server is not None:
            self._server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        line = Line(reader, writer)
        try:
            await self._answer(line, await line.receive(Question))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the other process has ended, or its client has left
        except asyncio.CancelledError:
            pass  # closed; asyncio would log it
        except Exception:
            logger.exception("vtoken: a call of another API process failed")
        finally:
            line.close()
            self._open.discard(task)

    async def _answer(self, line: Line, question: Question) -> None:
        match question:
            case Call():
                await self._handle(line, question)
            case Admission():
                await line.send(self._verdict(question))
            case Scrape():
                await line.send(Piece(await self._metrics()))
            case HealthQuestion():
                await line.send(HealthAnswer(self._health()))
            case _:
                assert_never(question)

    def _verdict(self, question: Admission) -> Verdict:
        try:
            self._check.admit(question.scope.as_dict())
        except ProblemError as error:
            return Verdict(error.problem, error.headers)
        return Verdict(None)

    async def _handle(self, line: Line, call: Call) -> None:
        """Run the application; its answer goes to the other process.

        A change is completed even if nobody waits for the answer any more.
        """

        async def rest() -> Message:
            await line.closed()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            with contextlib.suppress(OSError):
                if message["type"] == "http.response.start":
                    await line.send(Head(message["status"], list(message.get("headers", ()))))
                elif message["type"] == "http.response.body":
                    piece = Piece(bytes(message.get("body", b"")), message.get("more_body", False))
                    if piece.data or not piece.more:
                        await line.send(piece)

        scope = {**call.scope.as_dict(), AGAIN: call.again}
        await self._check(scope, replay(call, rest), send)
