"""A real server on loopback for tests: the plugin on a FastAPI app, in front of a test engine.

The engine is any `handle(Command) -> Reply`. Plugin and engine communicate as in vLLM: one call
named `vtoken_command`, bytes in, bytes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import queue
import tempfile
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import httpx
import msgspec
import uvicorn
from fastapi import FastAPI

from tests.support.tls import TLS
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.base.errors import RefusedError
from vtoken.wire import commands
from vtoken_api.bus import EngineBus
from vtoken_api.engine import Engine
from vtoken_api.limits import RateLimits
from vtoken_api.plugin import VTokenEndpointPlugin
from vtoken_api.service import Service
from vtoken_api.settings import SHARED_FOLDER


class SpelledWords:
    """A tokenizer for the vocabulary ids of `tests.support.core.live.Words`: a special word, words
    of letters, full stops, and a character of three tokens.
    """

    BYTES = {n: f" w{n}".encode() for n in range(97)} | {
        0: b"<s>",
        9: b".\n",
        41: b" \xe6",
        42: b"\x97",
        43: b"\xa5",
    }

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return b"".join(self.BYTES[n] for n in ids).decode(errors="replace")


class EngineClient:
    """The part of vLLM's engine client that the plugin may use, for one engine or several."""

    def __init__(self, handles: Sequence[Callable[[commands.Command], wire.Reply]]) -> None:
        self.engine_core = self
        self.client_index = 0
        self.errored = False
        self.aborted: list[str] = []
        self.engines = [EngineLine(handle) for handle in handles]
        self.engine_ranks_managed = list(range(len(handles)))
        self.core_engines = [rank.to_bytes(2, "little") for rank in self.engine_ranks_managed]

    def of_process(self, index: int) -> EngineClient:
        """The client of another API process, to the same engines."""
        other = copy.copy(self)
        other.engine_core, other.client_index, other.aborted = other, index, []
        return other

    def get_tokenizer(self) -> SpelledWords:
        return SpelledWords()

    async def abort(self, request_id: str, *, internal: bool) -> None:
        assert internal
        self.aborted.append(request_id)

    async def _call_utility_async(self, method: str, *args: object, engine: bytes) -> bytes:
        assert method == "vtoken_command"
        (payload,) = args
        assert type(payload) is bytes
        return await self.engines[self.core_engines.index(engine)].send(payload)

    async def close(self) -> None:
        """Forget the calls that engines have not answered."""
        for engine in self.engines:
            await engine.close()


class EngineLine:
    """The line to one engine.

    As in vLLM, a call that was sent reaches the engine, in order, also if its caller has given up.
    `hangs`: the engine is stopped. `answers_late`: it handles calls, and its answers are stopped.
    `most_awaited`: the most calls whose answers were awaited at a time.
    """

    def __init__(self, handle: Callable[[commands.Command], wire.Reply]) -> None:
        self.hangs = False
        self.answers_late = False
        self.most_awaited = 0
        self._awaited = 0
        self.calls: list[commands.Command] = []
        self._handle = handle
        self._turn = asyncio.Lock()
        self._sent: set[asyncio.Task[bytes]] = set()

    async def send(self, payload: bytes) -> bytes:
        sent = asyncio.create_task(self._deliver(payload))
        self._sent.add(sent)
        sent.add_done_callback(self._sent.discard)
        self._awaited += 1
        self.most_awaited = max(self.most_awaited, self._awaited)
        try:
            return await asyncio.shield(sent)
        finally:
            self._awaited -= 1

    async def close(self) -> None:
        for sent in self._sent:
            sent.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)

    async def _deliver(self, payload: bytes) -> bytes:
        async with self._turn:
            while self.hangs:
                await asyncio.sleep(0.01)
            answer = self.answer(payload)
        while self.answers_late:
            await asyncio.sleep(0.01)
        return answer

    def answer(self, payload: bytes) -> bytes:
        try:
            command = commands.read_command(payload)
        except RefusedError as error:
            return msgspec.msgpack.encode(wire.Reply(problem=wire.Problem.of(error)))
        self.calls.append(command)
        return msgspec.msgpack.encode(self._handle(command))


@dataclass
class Other:
    """An API process of a server that forwards its calls to the first."""

    url: str
    client: EngineClient


@dataclass
class Served:
    """A running server, and a client of it; `others`: further API processes, each with a port of
    its own.
    """

    url: str
    http: httpx.AsyncClient
    app: FastAPI
    client: EngineClient
    service: Service
    server: uvicorn.Server
    others: list[Other]
    stop_listening: Callable[[], Awaitable[None]]  # to the others

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def stream_url(self) -> str:
        return self.url.replace("http://", "ws://") + "/vtoken/v1/stream"

    @property
    def line(self) -> EngineLine:
        """The line to the first engine."""
        return self.client.engines[0]

    @property
    def bus(self) -> EngineBus:
        """The bus to the first engine."""
        return self.service.fleet.engines[0]

    @property
    def engine(self) -> Engine:
        """What the API has of the first engine."""
        return self.service.engines[self.bus.rank]

    def calls_of(self, *ops: str) -> list[Any]:
        """The calls of kinds `ops` that the first engine received, in order."""
        return [command.call for command in self.line.calls if command.op in ops]


@contextlib.asynccontextmanager
async def serve(
    *handles: Callable[[commands.Command], wire.Reply],
    host: str | None = "127.0.0.1",
    port: int = 0,
    api_key: list[str] | None = None,
    root_path: str = "",
    tls: TLS | None = None,
    processes: int = 1,
    **settings: str | bool,
) -> AsyncIterator[Served]:
    """Serve engines, each by its `handle`; `host` is reported to the plugin, the socket is always
    on loopback. `root_path`: as vLLM's `--root-path`; `tls`: as its `--ssl-keyfile`. `processes`:
    as its `--api-server-count`; all are in this process.

    `settings`: fields of `ApiSettings`; the state directory is a temporary one unless named.
    """
    client = EngineClient(handles)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shared = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, {SHARED_FOLDER: shared}))
        args = Namespace(
            host=host,
            port=0,
            uds=None,
            api_key=api_key,
            model="scripted",
            served_model_name=None,
            api_server_count=processes,
            additional_config={"vtoken": {"api": {"state_dir": folder, **settings}}},
        )
        stack.push_async_callback(client.close)
        app, server, url = await stack.enter_async_context(
            _process(client, args, port, root_path, tls)
        )
        plugin: VTokenEndpointPlugin = app.state.plugin
        others = []
        for index in range(1, processes):
            other = client.of_process(index)
            process = _process(other, args, 0, root_path, tls)
            _, _, its_url = await stack.enter_async_context(process)
            others.append(Other(its_url, other))
        stop = partial(_stop_listening, plugin)
        http = httpx.AsyncClient(base_url=url, verify=False)
        await stack.enter_async_context(http)
        yield Served(url, http, app, client, app.state.vtoken, server, others, stop)


@contextlib.asynccontextmanager
async def _process(
    client: EngineClient, args: Namespace, port: int, root_path: str, tls: TLS | None
) -> AsyncIterator[tuple[FastAPI, uvicorn.Server, str]]:
    """One API process: its application, its server and its URL."""
    app = FastAPI()
    app.root_path = root_path

    @app.get("/v1/models")
    async def models() -> dict[str, str]:
        return {"object": "list"}

    plugin = app.state.plugin = VTokenEndpointPlugin()
    plugin.attach_router(app)
    await plugin.init_state(client, app.state, args)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        lifespan="off",
        log_config=None,
        ssl_keyfile=None if tls is None else tls.key,
        ssl_certfile=None if tls is None else tls.certificate,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        scheme = "http" if tls is None else "https"
        yield app, server, f"{scheme}://127.0.0.1:{port}"
    finally:
        await plugin.close()
        await _end(server)
        await _stop_listening(plugin)


async def _stop_listening(plugin: VTokenEndpointPlugin) -> None:
    if plugin.listening is not None:
        await _end(plugin.listening)


async def _end(server: uvicorn.Server) -> None:
    """Like `uvicorn.Server.shutdown`, without its sleeps of tenths of a second."""
    state = server.server_state
    for listener in server.servers:
        listener.close()
    for connection in list(state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            while state.connections or state.tasks:
                await asyncio.sleep(0.005)
    for task in state.tasks:
        task.cancel()
    for connection in list(state.connections):  # of clients that do not answer
        connection.transport.abort()
    while state.connections:
        await asyncio.sleep(0)


@contextlib.contextmanager
def serve_in_thread(make_engine: Callable[[], Any], **settings: Any) -> Iterator[Served]:
    """`serve` in a separate event loop, for blocking clients; the engine is made there too.

    `make_engine()` has `handle` and `close`. Calls are not limited, so that a test may make many.
    """
    started: queue.Queue[Served | BaseException] = queue.Queue()
    ended = threading.Event()

    async def main() -> None:
        engine = make_engine()
        try:
            async with serve(engine.handle, **settings) as served:
                served.service.auth.limits = RateLimits({})
                started.put(served)
                while not ended.is_set():
                    await asyncio.sleep(0.01)
        finally:
            engine.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=run, name="server")
    thread.start()
    first = started.get(timeout=LIMIT_S)
    if isinstance(first, BaseException):
        raise first
    try:
        yield first
    finally:
        ended.set()
        thread.join()
