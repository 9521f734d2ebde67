"""The clients of `vtoken bench stream`, in their own process: they receive, count and check.

Arguments: the number of clients, seconds, and the URL. Prints "ready" when all have a snapshot,
then one JSON document with the counts of each.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from websockets.asyncio.client import connect

from vtoken import wire


class Head(msgspec.Struct):
    """The fields of a message that the counting needs."""

    type: str
    seq: int
    n: int = 0


class Counted(msgspec.Struct):
    """Counts of one stream; `state_messages` are deltas."""

    bytes: int = 0
    state_messages: int = 0
    missed_events: int = 0
    gaps: int = 0
    snapshot_bytes: int = 0


NUM_BEGINNING = 8  # streams that connect at once
CONNECT: dict[str, Any] = {
    "max_size": None,
    "compression": None,
    "open_timeout": 60,
    "ping_timeout": 60,
}


async def listen(
    url: str, gate: asyncio.Semaphore, ready: asyncio.Barrier, seconds: float
) -> Counted:
    """Connect, wait for the other streams, then count for `seconds`."""
    counted = Counted()
    async with AsyncExitStack() as stack:
        async with gate:
            stream = await stack.enter_async_context(connect(url, **CONNECT))
            while True:
                data = await stream.recv(decode=False)
                last = msgspec.msgpack.decode(data, type=Head)
                if last.type == "snapshot":
                    counted.snapshot_bytes = len(data)
                    break
        if await ready.wait() == 0:
            print("ready", flush=True)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                data = await asyncio.wait_for(stream.recv(decode=False), left)
            except TimeoutError:
                break
            head = msgspec.msgpack.decode(data, type=Head)
            counted.bytes += len(data)
            counted.state_messages += head.type == wire.Delta.__struct_config__.tag
            counted.missed_events += head.n if head.type == "dropped" else 0
            counted.gaps += head.seq != last.seq + 1
            last = head
    return counted


async def run(url: str, num_clients: int, seconds: float) -> list[Counted]:
    """Run all clients at once; print "ready" when the last one has its snapshot."""
    gate, ready = asyncio.Semaphore(NUM_BEGINNING), asyncio.Barrier(num_clients)
    return await asyncio.gather(*[listen(url, gate, ready, seconds) for _ in range(num_clients)])


def main(argv: list[str]) -> None:
    num_clients, seconds, url = int(argv[0]), float(argv[1]), argv[2]
    counted = asyncio.run(run(url, num_clients, seconds))
    print(msgspec.json.encode(counted).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
