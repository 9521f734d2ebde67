"""The bus: typed calls into the engine, the only place that calls it.

It uses one attribute path of the client that vLLM passes to endpoint plugins,
`engine_client.engine_core.call_utility_async(method, *args)`. vLLM encodes the arguments with
msgpack and looks the method up on its `EngineCore`, between two steps. The payloads:

    in    one positional argument, `bytes`: `msgspec.msgpack.encode(commands.Command)`
    out   `bytes`: `msgspec.msgpack.encode(wire.Reply)`

`bytes` pass through vLLM's encoder and decoder unchanged in both directions, with and without
VLLM_ALLOW_INSECURE_SERIALIZATION; a struct would arrive as a plain dict. The engine side is
`EngineCore.vtoken_command(payload: bytes) -> bytes`. It must not raise for a refused command,
because vLLM reduces an exception to its text; `Reply.problem` carries the refusal.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

import msgspec

from vtoken import commands, wire
from vtoken_api.log import logger
from vtoken_api.problems import ProblemError, refuse

UTILITY_METHOD = "vtoken_command"
CALL_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 4  # the most calls between two engine steps
MAX_WAITING = 64  # beyond that: 429

T = TypeVar("T")


class EngineBus:
    """Calls into the engine core, at most `MAX_IN_FLIGHT` at a time, each within CALL_TIMEOUT_S."""

    def __init__(self, engine_client: Any) -> None:
        self._client = engine_client
        self._timeout_s = CALL_TIMEOUT_S
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._waiting = 0

    @property
    def alive(self) -> bool:
        """False once vLLM has declared its engine dead."""
        return self._client is not None and not getattr(self._client, "errored", False)

    async def call(self, command: commands.Command) -> wire.Reply:
        """Send a command, with the time at which the caller gives up; the engine's reply.

        Raises ProblemError 422 (a number does not fit the wire format), 429 (too many callers), 500
        (an error in the engine) and 503 (no engine, or no answer in time; the engine never applies
        a change after that).
        """
        try:
            deadline = time.time() + self._timeout_s
            payload = msgspec.msgpack.encode(msgspec.structs.replace(command, expires_ts=deadline))
        except OverflowError as error:
            raise refuse(422, f"a number is too large: {error}", bound="64 bit") from error
        if not self.alive:
            raise _unavailable("the engine has stopped")
        if self._waiting >= MAX_WAITING:
            raise refuse(
                429,
                f"{self._waiting} calls are waiting for the engine",
                bound=f"{MAX_WAITING} calls",
                headers={"Retry-After": "1"},
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                answer = await self._client.engine_core.call_utility_async(UTILITY_METHOD, payload)
        except TimeoutError as error:
            raise _unavailable(
                f"the engine did not answer {command.op!r} within {self._timeout_s:g} s; a change "
                "was either applied by now or never will be: read the configuration"
            ) from error
        except Exception as error:
            logger.warning("vtoken: %s failed in the engine: %s", command.op, error)
            if not self.alive or type(error).__name__ == "EngineDeadError":
                raise _unavailable(f"the engine has stopped: {error}") from error
            raise refuse(500, f"{command.op!r} failed in the engine: {error}") from error
        finally:
            self._waiting -= 1
        return msgspec.msgpack.decode(answer, type=wire.Reply)

    async def ask(self, call: commands.AnyCall, kind: type[T], actor: str = "local") -> T:
        """The value of one call, converted to `kind`; raises ProblemError if it is refused."""
        reply = await self.call(commands.Command(call=call, actor=actor))
        if reply.problem is not None:
            raise ProblemError(reply.problem)
        return msgspec.convert(reply.value, kind)


def _unavailable(detail: str) -> ProblemError:
    return refuse(503, detail, title="Engine unavailable", headers={"Retry-After": "1"})
