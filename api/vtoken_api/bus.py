"""The bus: typed calls into the engine, the only place that calls it.

It uses one attribute path of the client that vLLM passes to endpoint plugins,
`engine_client.engine_core._call_utility_async(method, *args, engine=identity)`: vLLM's public forms
call the first engine, or all and fail if one does. vLLM encodes the arguments with msgpack and
looks the method up on its `EngineCore`, between two steps. The payloads:

    in    one positional argument, `bytes`: `msgspec.msgpack.encode(commands.Command)`
    out   `bytes`: `msgspec.msgpack.encode(wire.Reply)`

`bytes` pass through vLLM's encoder and decoder unchanged in both directions, with and without
VLLM_ALLOW_INSECURE_SERIALIZATION; a struct would arrive as a plain dict. The engine side is
`EngineCore.vtoken_command(payload: bytes) -> bytes`. It must not raise for a refused command,
because vLLM reduces an exception to its text; `Reply.problem` carries the refusal.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from vtoken import wire
from vtoken.wire import commands
from vtoken_api.limits import EngineTime
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse

UTILITY_METHOD = "vtoken_command"
CALL_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 4  # the most calls between two engine steps
MAX_WAITING = 64  # beyond that: 429

T = TypeVar("T")


# Of the call that the current task serves; None: a change, or the server's own work.
BILL: ContextVar[EngineTime | None] = ContextVar("vtoken.bill", default=None)


def engines_of(engine_client: Any) -> list[EngineBus]:
    """A bus to each engine that this API process manages, in the order of their ranks."""
    core = engine_client.engine_core
    engines = zip(core.engine_ranks_managed, core.core_engines, strict=True)
    return [EngineBus(engine_client, rank, identity) for rank, identity in engines]


def process_index(engine_client: Any) -> int:
    """The number of this API process among those of the server, from 0."""
    return int(engine_client.engine_core.client_index)


class EngineBus:
    """Calls into one engine core, at most `MAX_IN_FLIGHT` at a time, each within `timeout_s`.

    `rank`: vLLM's data-parallel rank of the engine; `identity`: its ZMQ identity.
    """

    def __init__(self, engine_client: Any, rank: int, identity: bytes) -> None:
        self._client = engine_client
        self.rank = rank
        self._identity = identity
        self.timeout_s = CALL_TIMEOUT_S
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._waiting = 0

    @property
    def alive(self) -> bool:
        """False once vLLM has declared its engines dead; it does so for all at once."""
        return self._client is not None and not getattr(self._client, "errored", False)

    async def call(self, command: commands.Command) -> wire.Reply:
        """Send a command, with the time at which the caller gives up; the engine's reply.

        Raises ProblemError 422 (a number does not fit the wire format), 429 (too many callers), 500
        (an error in the engine) and 503 (no engine, or no answer in time). The answer to a change
        is waited for, however late: an engine that gets the call after its time refuses it.
        """
        try:
            deadline = min(time.time() + self.timeout_s, command.expires_ts or math.inf)
            payload = msgspec.msgpack.encode(msgspec.structs.replace(command, expires_ts=deadline))
        except OverflowError as error:
            raise refuse(422, f"a number is too large: {error}", bound="64 bit") from error
        if not self.alive:
            raise unavailable("the engine has stopped")
        if self._waiting >= MAX_WAITING:
            raise refuse(
                429,
                f"{self._waiting} calls are waiting for the engine",
                bound=f"{MAX_WAITING} calls",
                headers={"Retry-After": "1"},
            )
        self._waiting += 1
        bill = BILL.get()
        patience_s = self.timeout_s if command.change_id is None else None
        try:
            async with asyncio.timeout(patience_s), self._slots:
                if bill is not None:
                    bill.require_no_debt()
                if patience_s is None and time.time() > deadline:
                    raise unavailable("nothing was done: other calls kept the engine too long")
                answer = await self._client.engine_core._call_utility_async(
                    UTILITY_METHOD, payload, engine=self._identity
                )
        except ProblemError:
            raise
        except TimeoutError as error:
            late = f"the engine did not answer {command.op!r} within {self.timeout_s:g} s"
            raise unavailable(late) from error
        except Exception as error:
            logger.warning("vtoken: %s failed in the engine: %s", command.op, error)
            if not self.alive or type(error).__name__ == "EngineDeadError":
                raise unavailable(f"the engine has stopped: {error}") from error
            raise refuse(500, f"{command.op!r} failed in the engine: {error}") from error
        finally:
            self._waiting -= 1
        reply = msgspec.msgpack.decode(answer, type=wire.Reply)
        if bill is not None:
            bill.charge(reply.engine_s)
        return reply

    async def ask(
        self,
        call: commands.AnyCall,
        kind: type[T],
        actor: str = "local",
        change_id: str | None = None,
        expires_ts: float | None = None,
    ) -> T:
        """The value of one call, converted to `kind`; raises ProblemError if it is refused."""
        command = commands.Command(
            call=call, actor=actor, change_id=change_id, expires_ts=expires_ts
        )
        reply = await self.call(command)
        if reply.problem is not None:
            raise ProblemError(reply.problem)
        value = msgspec.convert(reply.value, kind)
        parts: list[Any] = [value]
        if isinstance(value, wire.Change):
            parts += [value.result, value.operation, value.forgotten, value.ended, value.restored]
        for part in parts:
            if isinstance(part, wire.OfEngine | wire.RequestDetail):
                part.engine = self.rank
        return value


def unavailable(detail: str) -> ProblemError:
    """503: no engine, or no answer in time."""
    return refuse(503, detail, title="Engine unavailable", headers={"Retry-After": "1"})
