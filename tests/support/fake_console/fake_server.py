"""TEST SERVER: speaks the console's wire over real HTTP and websockets, on simulated bookkeeping.

Not vToken: run it to look at the console (`python -m tests.support.fake_console.fake_server`) or
start it in a test with `FakeServer`. It records every change that clients ask for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import time
from typing import Any

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.support.fake_console.fake_control import RefusedError
from tests.support.fake_console.simulated_controls import Controls
from tests.support.fake_console.simulated_documents import POLICIES
from vtoken import wire


class FakeServer(Controls):
    """`start()` binds, `stop()` closes; `patches`, `compactions`, `undos` record the calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tasks: list[asyncio.Task[Any]] = []
        self._server: uvicorn.Server | None = None

    # ------------------------------------------------------------ life

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = Starlette(
            routes=[
                WebSocketRoute("/vtoken/v1/stream", self.stream),
                Route("/vtoken/v1/{path:path}", self.rest, methods=["GET", "POST", "PATCH"]),
            ]
        )
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_level="error",
            ws="websockets-sansio",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._fill()
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[listener])),
            asyncio.create_task(self._run()),
        ]
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        assert self._server is not None
        self._tasks[1].cancel()
        self._server.should_exit = True
        self._server.force_exit = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    # ------------------------------------------------------------ stream

    async def stream(self, socket: WebSocket) -> None:
        if self.token and socket.headers.get("authorization") != f"Bearer {self.token}":
            await socket.send_denial_response(Response(status_code=401))
            return
        await socket.accept()
        fps = float(socket.query_params.get("fps", "10"))
        seq = 0

        async def send(kind: Any, **fields: Any) -> None:
            nonlocal seq
            message = kind(
                epoch=self.epoch, seq=seq + self.skip_seq, step=self.step, ts=time.time(), **fields
            )
            self.skip_seq = 0
            seq += 1
            await socket.send_bytes(msgspec.msgpack.encode(message))

        pool = self.pool
        with contextlib.suppress(WebSocketDisconnect):
            hello = self.hello_fields(fps, can_control=self.can_control)
            await send(wire.Hello, **hello)
            live, flags, owner = pool.live.copy(), pool.flags.copy(), pool.owner.copy()
            rows = {r.id: self.row(r) for r in pool.requests.values()}
            sent_event = self.events[-1].seq
            revision = (self.revision, self.config_version)
            await send(
                wire.Snapshot,
                status=self.status(),
                config=self.config_document(),
                live=live.tobytes(),
                flags=flags.tobytes(),
                owner=owner.tobytes() if self.tells_owners else None,
                requests=list(rows.values()),
            )
            while True:
                await asyncio.sleep(1 / fps)
                if self.hung:
                    await send(wire.Heartbeat)
                    continue
                for event in [e for e in self.events if e.seq > sent_event]:
                    sent_event = event.seq
                    await send(wire.EventMessage, event=event)
                for _ in range(self.event_storm):
                    await send(wire.Heartbeat)
                changed = np.flatnonzero(
                    (pool.live != live) | (pool.flags != flags) | (pool.owner != owner)
                )
                now = {r.id: self.row(r) for r in pool.requests.values()}
                await send(
                    wire.Delta,
                    block_ids=changed.astype("<u4").tobytes(),
                    block_live=pool.live[changed].astype("<u2").tobytes(),
                    block_flags=pool.flags[changed].tobytes(),
                    block_owner=(
                        pool.owner[changed].astype("<u2").tobytes() if self.tells_owners else None
                    ),
                    requests_changed=[r for k, r in now.items() if rows.get(k) != r],
                    requests_removed=[k for k in rows if k not in now],
                    status=self.status(),
                    config=self.config_document()
                    if revision != (self.revision, self.config_version)
                    else None,
                )
                live, flags, owner = pool.live.copy(), pool.flags.copy(), pool.owner.copy()
                rows = now
                revision = (self.revision, self.config_version)

    # ------------------------------------------------------------ REST

    async def rest(self, request: Request) -> Response:
        body = await request.body()
        try:
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                raise RefusedError(status=401, title="Unauthorized", detail="a token is required")
            value, status = self.answer(request, msgspec.json.decode(body) if body else None)
        except RefusedError as refusal:
            return Response(
                msgspec.json.encode(refusal.problem),
                refusal.problem.status,
                media_type="application/problem+json",
            )
        return Response(msgspec.json.encode(value), status, media_type="application/json")

    def answer(self, request: Request, body: Any) -> tuple[Any, int]:
        path, query = request.path_params["path"].split("/"), request.query_params
        match [request.method, *path]:
            case ["GET", "status"]:
                return self.status(), 200
            case ["GET", "config"]:
                return self.config_document(), 200
            case ["GET", "policies"]:
                return POLICIES, 200
            case ["GET", "events"]:
                after, limit = int(query.get("after", 0)), int(query.get("limit", 100))
                found = [e for e in self.events if e.seq > after][:limit]
                return wire.EventPage(
                    events=found, first_seq=self.events[0].seq, last_seq=self.events[-1].seq
                ), 200
            case ["PATCH", "config"]:
                dry = query.get("validate_only") == "true"
                done = self.patch(body, dry, request.headers.get("if-match"))
                return done if dry else self.control.start(query, done), 200
            case ["POST", "confirm"]:
                return self.control.confirm(), 200
            case ["POST", "undo"]:
                return self.undo(), 200
            case ["POST", "compactions"]:
                return self.compaction(body or {}), 202
            case ["GET", "operations", name] if name in self.operations:
                return self.operations[name], 200
            case ["GET", "blocks", name]:
                return self.block(int(name)), 200
            case ["GET", "requests", name, *rest] if name in self.pool.requests:
                sim = self.pool.requests[name]
                if rest:
                    return self.tokens(sim, int(query["start"]), int(query["limit"])), 200
                by_block = self.pool._block_live(sim)
                row = msgspec.structs.asdict(self.row(sim))
                return wire.RequestDetail(
                    **row, block_table=sim.table, block_live=[len(by_block[b]) for b in sim.table]
                ), 200
        raise RefusedError(status=404, title="Not found", detail=f"no {'/'.join(path)} here")


async def main() -> None:
    parser = argparse.ArgumentParser(description="test server for the console; not vToken")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--blocks", type=int, default=5427)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--warm", type=int, default=400, help="steps taken before it listens")
    parser.add_argument("--read-only", action="store_true")
    args = parser.parse_args()
    server = FakeServer(
        num_blocks=args.blocks,
        num_requests=args.requests,
        port=args.port,
        step_s=args.step,
        can_control=not args.read_only,
        limit=1500,
        prompt=400,
    )
    server._fill()
    for _ in range(args.warm):
        server.tick()
    await server.start()
    print(f"TEST SERVER (simulated bookkeeping, no model) on {server.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
