"""One API process of several: the plugin on a FastAPI app, in front of engines of another process.

Started by `tests.support.api_processes`. Its line to the engines is a ZMQ socket, as vLLM's is. It
prints its port once it serves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
from argparse import Namespace
from typing import Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from fastapi import FastAPI

from tests.support.serving import SpelledWords
from vtoken_api.plugin import VTokenEndpointPlugin


class RemoteClient:
    """The part of vLLM's engine client that the plugin may use, for engines behind `endpoint`."""

    def __init__(self, endpoint: str, num_engines: int) -> None:
        self.engine_core = self
        self.errored = False
        self.engine_ranks_managed = list(range(num_engines))
        self.core_engines = [rank.to_bytes(2, "little") for rank in self.engine_ranks_managed]
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._task = asyncio.create_task(self._receive())

    def get_tokenizer(self) -> SpelledWords:
        return SpelledWords()

    async def _call_utility_async(self, method: str, payload: bytes, *, engine: bytes) -> bytes:
        assert method == "vtoken_command"
        number = b"%d" % next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart([number, engine, payload])
        return await answer

    async def _receive(self) -> None:
        while True:
            number, answer = await self._socket.recv_multipart()
            waiting = self._waiting.pop(number)
            if not waiting.done():
                waiting.set_result(answer)


async def main(settings: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    app = FastAPI()
    plugin = VTokenEndpointPlugin()
    plugin.attach_router(app)
    args = Namespace(
        host="127.0.0.1",
        port=0,
        uds=None,
        api_key=None,
        model="core",
        served_model_name=None,
        api_server_count=2,  # or more
        additional_config={"vtoken": {"api": settings["api"]}},
    )
    client = RemoteClient(settings["endpoint"], settings["num_engines"])
    await plugin.init_state(client, app.state, args)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=600,
    )
    config.load()
    server = app.state.server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await server.main_loop()
    await asyncio.Event().wait()  # as with a client that does not let go


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1])))
