"""Several API processes, as `--api-server-count` makes them, in front of cores of this process.

Each has a port of its own, so that a test can name the process that it calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from tests.support.core.live import LiveEngine
from tests.support.waiting import LIMIT_S
from vtoken.base.errors import RefusedError
from vtoken.wire import commands

BASE = "/vtoken/v1"
ROOT = Path(__file__).parents[2]


class EngineLines:
    """Takes the calls of all processes to `cores`, one at a time each, in order.

    `before(rank, command)` is awaited before a call is handled, `after` before its answer is sent:
    a test may hold either.
    """

    def __init__(self, cores: Sequence[LiveEngine], endpoint: str) -> None:
        self.cores = cores
        self.before: Callable[[int, commands.Command], Any] = _nothing
        self.after: Callable[[int, commands.Command], Any] = _nothing
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._queues: list[asyncio.Queue[tuple[bytes, bytes, bytes]]] = [
            asyncio.Queue() for _ in cores
        ]
        self._tasks = [asyncio.create_task(self._receive())]
        self._tasks += [asyncio.create_task(self._handle(rank)) for rank in range(len(cores))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def _receive(self) -> None:
        while True:
            caller, number, engine, payload = await self._socket.recv_multipart()
            self._queues[int.from_bytes(engine, "little")].put_nowait((caller, number, payload))

    async def _handle(self, rank: int) -> None:
        while True:
            caller, number, payload = await self._queues[rank].get()
            try:
                command = commands.read_command(payload)
            except RefusedError as error:
                reply = commands.refused(error)
            else:
                await self.before(rank, command)
                reply = self.cores[rank].handle(command)
                await self.after(rank, command)
            answer = msgspec.msgpack.encode(reply)
            await self._socket.send_multipart([caller, number, answer])


async def _nothing(rank: int, command: commands.Command) -> None:
    pass


class ApiProcess:
    """A running process; `http` calls it under `/vtoken/v1`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        self.stream_url = f"ws://127.0.0.1:{port}{BASE}/stream"
        self.http = httpx.AsyncClient(base_url=self.url + BASE, timeout=LIMIT_S)

    def log(self) -> str:
        return self._log.read_text()

    async def kill(self) -> None:
        """End it at once, as the kernel does when memory is out."""
        os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def close(self) -> None:
        await self.http.aclose()
        if self.process.returncode is None:
            await self.kill()


class ApiProcesses(list[ApiProcess]):
    """All processes of one server, in the order of their start; the first is the owner."""

    def __init__(self, folder: Path, settings: dict[str, Any], lines: EngineLines) -> None:
        self.lines = lines
        self.shared = folder / "shared"  # the folder that they share
        self._folder = folder
        self._settings = settings

    async def start(self) -> ApiProcess:
        """Start one more."""
        log = self._folder / f"{len(self)}.log"
        process = await _start(self._settings, self.shared, log)
        self.append(process)
        return process


@contextlib.asynccontextmanager
async def api_processes(
    number: int, cores: Sequence[LiveEngine], **api: Any
) -> AsyncIterator[ApiProcesses]:
    """A server of `number` API processes; `api`: fields of `ApiSettings`."""
    with tempfile.TemporaryDirectory(prefix="vtoken-test-") as name:
        folder = Path(name)
        endpoint = f"ipc://{folder / 'engines'}"
        settings = {
            "num_engines": len(cores),
            "endpoint": endpoint,
            "api": {"state_dir": str(folder / "state"), **api},
        }
        processes = ApiProcesses(folder, settings, EngineLines(cores, endpoint))
        processes.shared.mkdir(mode=0o700)
        try:
            for _ in range(number):
                await processes.start()
            yield processes
        finally:
            for process in processes:
                await process.close()
            await processes.lines.close()


async def _start(settings: dict[str, Any], shared: Path, log: Path) -> ApiProcess:
    arguments = msgspec.json.encode(settings).decode()
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.api_process", arguments),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "VTOKEN_API_FOLDER": str(shared)},
        )
    assert process.stdout is not None
    port = await process.stdout.readline()
    assert port, log.read_text()
    return ApiProcess(process, int(port), log)
