"""vToken's API server without vLLM, for benchmarks: `python -m vtoken_bench.api_server`.

The engine answers commands on a ZMQ REQ/REP socket, with the same bytes as on vLLM's wire. Calls
are not limited: all clients have one address here. The process prints its port, and exits when
standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from argparse import Namespace

import uvicorn
import zmq.asyncio
from fastapi import FastAPI
from zmq.constants import SocketType

from vtoken_api.limits import RateLimits
from vtoken_api.plugin import VTokenEndpointPlugin


class SocketClient:
    """The part of vLLM's engine client that the plugin uses, over a socket; one call at a time."""

    def __init__(self, endpoint: str) -> None:
        self.engine_core = self
        self.errored = False
        self.engine_ranks_managed = [0]
        self.core_engines = [(0).to_bytes(2, "little")]
        self._socket = zmq.asyncio.Context.instance().socket(SocketType.REQ)
        self._socket.connect(endpoint)
        self._turn = asyncio.Lock()

    async def _call_utility_async(self, method: str, *args: bytes, engine: bytes) -> bytes:
        del method, engine
        async with self._turn:
            await self._socket.send(args[0])
            answer: bytes = await self._socket.recv()
            return answer


async def serve(engine: str, state_dir: str) -> None:
    app = FastAPI()
    plugin = VTokenEndpointPlugin()
    plugin.attach_router(app)
    args = Namespace(
        host="127.0.0.1",
        port=0,
        uds=None,
        api_key=None,
        model="bench",
        served_model_name=None,
        additional_config={"vtoken": {"api": {"state_dir": state_dir}}},
    )
    await plugin.init_state(SocketClient(engine), app.state, args)
    app.state.vtoken.auth.limits = RateLimits({})
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(task, 5)
    await plugin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, help="ZMQ endpoint that answers commands")
    parser.add_argument("--state-dir", required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.engine, arguments.state_dir))


if __name__ == "__main__":
    main()
