"""A stream server for `vtoken bench console` that simulates a busy engine with arrays.

There is no engine and no model. 256 requests fill a pool of 70,000 blocks. Each appends three
tokens a frame (a step of 33 ms) and evicts down to its budget; now and then one is compacted or
replaced. A frame changes as much as on a busy server. Every path but the stream answers 404.

With several engines, the streams of all show the same pool, which advances ten times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from vtoken import wire

BLOCK_SIZE = 16
TOKENS_A_FRAME = 3
BUDGET, INTERVAL = 3840, 128
EPOCH = "bench"


class Traffic:
    """The pool of a busy server; `frame` advances it by a tenth of a second."""

    def __init__(self, num_blocks: int, num_requests: int, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_blocks = num_blocks
        self.live = np.zeros(num_blocks, np.uint16)
        self.flags = np.zeros(num_blocks, np.uint8)
        self.owner = np.zeros(num_blocks, np.uint16)
        self.free: list[int] = self.rng.permutation(np.arange(1, num_blocks)).tolist()
        self.tables: list[list[int]] = [[] for _ in range(num_requests)]
        self.tokens = np.zeros(num_requests, np.int64)  # live tokens of a request
        self.dead = np.zeros(num_requests, np.int64)
        self.step = self.generated = self.moved = self.relocations = self.reclaimed = 0
        self.event_seq = 0
        for request in range(num_requests):
            self._begin(request, int(self.rng.integers(400, BUDGET)))

    def _begin(self, request: int, tokens: int) -> None:
        blocks = self._take(-(-tokens // BLOCK_SIZE))
        self.tables[request] = blocks
        self.live[blocks] = BLOCK_SIZE
        self.live[blocks[-1:]] = tokens - (len(blocks) - 1) * BLOCK_SIZE
        self.flags[blocks] = wire.FLAG_USED
        self.flags[blocks[:2]] |= wire.FLAG_HASHED
        self.owner[blocks] = request + 1
        self.tokens[request], self.dead[request] = tokens, 0

    def _take(self, count: int) -> list[int]:
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def _release(self, blocks: list[int]) -> None:
        for array in (self.live, self.flags, self.owner):
            array[blocks] = 0
        self.free[:0] = blocks
        self.reclaimed += len(blocks)

    def frame(self) -> list[wire.Event]:
        """Append to every request; evict, compact and replace some. Return the events."""
        events: list[wire.Event] = []
        self.step += TOKENS_A_FRAME
        self.flags &= np.uint8(~(wire.FLAG_IN_FLIGHT | wire.FLAG_TAIL) & 0xFF)
        for request, table in enumerate(self.tables):
            for _ in range(TOKENS_A_FRAME):
                if not table or self.live[table[-1]] >= BLOCK_SIZE:
                    if not self.free:
                        break
                    table += self._take(1)
                    self.flags[table[-1]] = wire.FLAG_USED
                    self.owner[table[-1]] = request + 1
                self.live[table[-1]] += 1
                self.tokens[request] += 1
                self.generated += 1
            self.flags[table[-1]] |= wire.FLAG_TAIL
            if self.tokens[request] > BUDGET + INTERVAL:
                self._evict(request)
        if self.rng.random() < 0.3:
            events.append(self._compact(int(self.rng.integers(len(self.tables)))))
        if self.rng.random() < 0.1:
            request = int(self.rng.integers(len(self.tables)))
            self._release(self.tables[request])
            self._begin(request, int(self.rng.integers(400, BUDGET)))
        return events

    def _evict(self, request: int) -> None:
        blocks = np.asarray(self.tables[request][:-1])
        victims = self.rng.choice(blocks, int(self.tokens[request]) - BUDGET)
        blocks, counts = np.unique(victims, return_counts=True)
        evicted = np.minimum(counts, self.live[blocks])
        self.live[blocks] -= evicted.astype(np.uint16)
        self.tokens[request] -= int(evicted.sum())
        self.dead[request] += int(evicted.sum())
        empty = blocks[self.live[blocks] == 0].tolist()
        if empty:
            self.tables[request] = [b for b in self.tables[request] if b not in set(empty)]
            self._release(empty)

    def _compact(self, request: int) -> wire.Event:
        table = self.tables[request]
        order = sorted(table[:-1], key=lambda b: -int(self.live[b]))
        total = int(self.live[order].sum())
        keep = -(-total // BLOCK_SIZE)
        sources, into = order[keep:][-32:], [b for b in order[:keep] if self.live[b] < BLOCK_SIZE]
        moved = int(self.live[sources].sum())
        left = moved
        for block in into:
            put = min(left, BLOCK_SIZE - int(self.live[block]))
            self.live[block] += put
            self.flags[block] |= wire.FLAG_IN_FLIGHT
            left -= put
        self.tables[request] = [b for b in table if b not in set(sources)]
        self._release(sources)
        self.moved += moved
        self.relocations += 1
        self.event_seq += 1
        data = wire.Relocation(
            request_id=f"cmpl-{request:08x}",
            moved_tokens=moved,
            moved_bytes=moved * 4096,
            source_blocks=sources,
            destination_blocks=into[:32],
            freed_blocks=len(sources),
            reason="auto",
            planner="plug",
            plan_us=80,
            copy_us=210,
        )
        return wire.Event(
            seq=self.event_seq,
            ts=time.time(),
            step=self.step,
            kind="relocation",
            summary=f"moved {moved} tok of {data.request_id}, freed {len(sources)} blocks, 210 µs",
            data=msgspec.to_builtins(data),
        )

    def rows(self) -> list[wire.RequestRow]:
        return [
            wire.RequestRow(
                id=f"cmpl-{n:08x}",
                state="running",
                live=int(self.tokens[n]),
                dead=int(self.dead[n]),
                prompt_tokens=300,
                output_tokens=int(self.tokens[n] + self.dead[n]) - 300,
                blocks=len(table),
                bound_blocks=-(-int(self.tokens[n]) // BLOCK_SIZE),
                naive_blocks=len(table) + 12,
                policy="h2o",
                budget_tokens=BUDGET,
                dense=True,
                number=n + 1,
            )
            for n, table in enumerate(self.tables)
        ]

    def status(self) -> wire.Status:
        used = self.flags != 0
        held, live = int(used.sum()), int(self.live.sum())
        f = 1 - live / max(1, held * BLOCK_SIZE)
        low = int((used & (self.live <= BLOCK_SIZE // 2)).sum())
        return wire.Status(
            schema=1,
            vtoken_version="0",
            vllm_version="0",
            model="bench/simulated",
            device="none",
            epoch=EPOCH,
            step=self.step,
            ts=time.time(),
            block_size=BLOCK_SIZE,
            blocks=wire.BlockCounts(
                total=self.num_blocks - 1,
                free=len(self.free),
                used=held,
                partially_live=int((used & (self.live < BLOCK_SIZE)).sum()),
                low_utilization=low,
                shared=0,
                headroom=64,
            ),
            tokens=wire.TokenCounts(
                live=live, dead=held * BLOCK_SIZE - live, generated=self.generated
            ),
            fragmentation=wire.Fragmentation(
                f=f,
                theta_f=0.25,
                cause="ok",
                sentence=f"Memory is not the limit: {len(self.free):,} blocks free.",
            ),
            reclamation=wire.Reclamation(
                state="auto",
                in_flight=0,
                relocations=self.relocations,
                moved_tokens=self.moved,
                moved_bytes=self.moved * 4096,
                reclaimed_blocks=self.reclaimed,
                recycled_slots=0,
            ),
            policy=wire.PolicyChoice(name="h2o"),
            budget_tokens=BUDGET,
            interval_tokens=INTERVAL,
            requests=wire.RequestCounts(running=len(self.tables), waiting=3, preempted=0),
            invariants=wire.Invariants(checked=self.step, violations=0),
            config_revision=1,
            step_ms=33.0,
        )


def _config() -> wire.ConfigDocument:
    values = wire.ConfigValues(
        policy=wire.PolicyChoice(name="h2o"),
        low_watermark_blocks=100,
        headroom_blocks=64,
        budget_tokens=BUDGET,
        interval_tokens=INTERVAL,
        probe=wire.Probe(every_steps=4),
    )
    return wire.ConfigDocument(revision=1, desired=values, effective=values, bounds={})


async def _stream(socket: ServerConnection, traffic: Traffic) -> None:
    """Serve one client as the API server does: hello, snapshot, then one delta per frame."""
    request = socket.request
    assert request is not None
    query = dict(parse_qsl(urlsplit(request.path).query))
    fps = float(query.get("fps", 10))
    wants_rows = "requests" in query.get("topics", "requests")
    seq = 0

    async def send(kind: Any, **fields: Any) -> None:
        nonlocal seq
        message = kind(epoch=EPOCH, seq=seq, step=traffic.step, ts=time.time(), **fields)
        seq += 1
        with contextlib.suppress(ConnectionClosed):  # the console has closed; the loop ends
            await socket.send(msgspec.msgpack.encode(message))

    await send(
        wire.Hello,
        schema=1,
        vtoken_version="0",
        vllm_version="0",
        model="bench/simulated",
        device="none",
        geometry=wire.Geometry(
            num_blocks=traffic.num_blocks,
            block_size=BLOCK_SIZE,
            num_layers=32,
            num_kv_heads=8,
            head_size=128,
            bytes_per_token=131072,
        ),
        policies=[],
        topics=["blocks", "requests", "events", "metrics"],
        fps=fps,
        can_control=True,
        engine=0,
        engines=[0],
    )
    live, flags, owner = traffic.live.copy(), traffic.flags.copy(), traffic.owner.copy()
    await send(
        wire.Snapshot,
        status=traffic.status(),
        config=_config(),
        live=live.tobytes(),
        flags=flags.tobytes(),
        owner=owner.tobytes(),
        requests=traffic.rows() if wants_rows else None,
    )
    while socket.close_code is None:
        await asyncio.sleep(1 / fps)
        for event in traffic.frame():
            await send(wire.EventMessage, event=event)
        changed = np.flatnonzero(
            (traffic.live != live) | (traffic.flags != flags) | (traffic.owner != owner)
        )
        live, flags, owner = traffic.live.copy(), traffic.flags.copy(), traffic.owner.copy()
        await send(
            wire.Delta,
            block_ids=changed.astype("<u4").tobytes(),
            block_live=live[changed].tobytes(),
            block_flags=flags[changed].tobytes(),
            block_owner=owner[changed].tobytes(),
            requests_changed=traffic.rows() if wants_rows else None,
            status=traffic.status(),
        )


def _not_found(connection: ServerConnection, request: Request) -> Response | None:
    """Answer 404 for every path but the stream."""
    if "/stream" in request.path:
        return None
    return connection.respond(http.HTTPStatus.NOT_FOUND, "only the stream is served here\n")


async def _serve(num_blocks: int, num_requests: int) -> None:
    traffic = Traffic(num_blocks, num_requests)
    for _ in range(200):
        traffic.frame()
    async with serve(
        lambda socket: _stream(socket, traffic),
        "127.0.0.1",
        0,
        process_request=_not_found,
        compression=None,
        max_size=None,
    ) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=70_001, help="with vLLM's null block")
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    asyncio.run(_serve(args.blocks, args.requests))


if __name__ == "__main__":
    main()
