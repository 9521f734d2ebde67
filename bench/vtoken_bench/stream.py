"""Cost of the stream: bytes and lost frames per client, CPU of the API server and the engine.

The publisher runs in this process (70,000 blocks, 64 requests that decode and evict, a step every
30 ms), the API server in a second one, the clients in a third; no model runs. On a machine with few
cores the three compete for them: read the server's CPU time, not the clients' latency.

`python -m vtoken_bench.stream REQUESTS` runs publisher and server alone, for the console.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq

from vtoken.control.controller import Controller
from vtoken.control.facts import EngineFacts
from vtoken.control.report import Reporter
from vtoken.control.telemetry import Publisher
from vtoken.wire import Frame
from vtoken_bench.counters import cpu_s
from vtoken_bench.decoding import BLOCK_SIZE, SLACK_TOKENS, Decoding
from vtoken_bench.output import Cell, Table, finish, new_result
from vtoken_bench.stream_clients import Counted

NUM_BLOCKS = 70_000
NUM_REQUESTS = 64
STEP_S = 0.03
FPS = 10


class Engine:
    """The engine's thread: steps, publishes, and answers commands between two steps."""

    def __init__(self, folder: Path, num_requests: int = NUM_REQUESTS) -> None:
        num_tokens = NUM_BLOCKS // num_requests * BLOCK_SIZE - SLACK_TOKENS
        decoding = Decoding(num_requests, num_tokens, {"reclamation": "auto"})
        patch = {"policy": {"name": "random"}, "budget_tokens": num_tokens // 2}
        decoding.configure({**patch, "interval_tokens": 16})
        decoding.step(decoding.ids)
        self._decoding = decoding
        self._publisher = Publisher(decoding.runtime.events)
        hashed = np.zeros(decoding.num_blocks, dtype=np.bool_)
        facts = EngineFacts("bench", "0", "0", "none", "cpu")
        reporter = Reporter(decoding.runtime, facts, hashed)
        self._controller = Controller(reporter, self._publisher.endpoint)
        self.endpoint = f"ipc://{folder / 'commands'}"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.bind(self.endpoint)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine")
        self.published_s = 0.0  # CPU time of the engine's thread in publishing
        self.num_frames = self.num_steps = 0

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._publisher.close()
        self._socket.close(linger=0)

    def _make_frame(self, *, with_status: bool) -> Frame:
        self.num_frames += 1
        return self._controller.frame(with_status=with_status)

    def thread_s(self) -> float:
        """CPU time of the engine's thread."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.is_set():
            self._decoding.step(self._decoding.ids)
            self.num_steps += 1
            started = time.thread_time()
            self._publisher.publish(self._make_frame)
            self.published_s += time.thread_time() - started
            due = max(due + STEP_S, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                if self._socket.poll(max(1, int(left * 1000))):
                    self._socket.send(self._controller.handle_bytes(self._socket.recv()))


class ApiServer:
    """`vtoken_bench.api_server` in a process of its own."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        module = [sys.executable, "-m", "vtoken_bench.api_server"]
        self._process = subprocess.Popen(
            [*module, "--engine", engine.endpoint, "--state-dir", str(folder / "state")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            raise RuntimeError("the API server exited, see its messages above")
        self.address = f"127.0.0.1:{port}"

    @property
    def stream_url(self) -> str:
        return f"ws://{self.address}/vtoken/v1/stream?format=msgpack&fps={FPS}"

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def cpu_s(self) -> float:
        """CPU time that the process has used so far."""
        return cpu_s(self._process.pid)


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU time [s] and counts of this process so far."""

    at: float
    published_s: float
    sending_s: float  # outside of the engine's and the caller's threads
    server_s: float
    num_frames: int
    num_steps: int

    @classmethod
    def now(cls, engine: Engine, server: ApiServer) -> Spent:
        server_s = server.cpu_s()
        threads_s = engine.thread_s() + time.thread_time()
        return cls(
            at=time.monotonic(),
            published_s=engine.published_s,
            sending_s=time.process_time() - threads_s,
            server_s=server_s,
            num_frames=engine.num_frames,
            num_steps=engine.num_steps,
        )


def _measure(
    engine: Engine, server: ApiServer, num_clients: int, seconds: float
) -> dict[str, Cell]:
    """One run; a second is one of wall time."""
    module = [sys.executable, "-m", "vtoken_bench.stream_clients"]
    with subprocess.Popen(
        [*module, str(num_clients), str(seconds), server.stream_url],
        stdout=subprocess.PIPE,
        text=True,
    ) as clients:
        assert clients.stdout is not None
        if clients.stdout.readline() != "ready\n":
            raise RuntimeError("the clients exited, see their messages above")
        begin = Spent.now(engine, server)
        counted = msgspec.json.decode(clients.stdout.readline(), type=list[Counted])
        end = Spent.now(engine, server)
    elapsed = end.at - begin.at
    published_s = end.published_s - begin.published_s
    return {
        "clients": str(num_clients),
        "KB/s a client": sum(c.bytes for c in counted) / num_clients / seconds / 1e3,
        "KB a snapshot": counted[0].snapshot_bytes / 1e3,
        "frames/s, slowest": min(c.state_messages for c in counted) / seconds,
        "events missed": sum(c.missed_events for c in counted),
        "gaps": sum(c.gaps for c in counted),  # lost messages that no `dropped` message reports
        "server CPU %": 100 * (end.server_s - begin.server_s) / elapsed,
        "engine %": 100 * published_s / elapsed,
        "µs a frame": 1e6 * published_s / (end.num_frames - begin.num_frames),
        "steps/s": (end.num_steps - begin.num_steps) / elapsed,
        "sending %": 100 * (end.sending_s - begin.sending_s) / elapsed,
    }


GOALS: dict[str, Cell] = {
    "clients": "goal",
    "frames/s, slowest": ">= 9",  # of 10 requested
    "events missed": "0",
    "gaps": "0",
    "engine %": "<= 1",
}
NOTES = (
    "server CPU: of one core, the flight recorder in it; engine: of its thread's time, in "
    "publishing, and that a frame",
    "steps: of 33 a second, fewer where the machine has no time for them; sending: of one core, in "
    "ZMQ's own threads",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--seconds", type=float, help="of each run (default 20, quick 3)")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    seconds = args.seconds or (3.0 if args.quick else 20.0)
    setup = {
        "blocks": NUM_BLOCKS,
        "requests": NUM_REQUESTS,
        "frames a second asked for": FPS,
        "load before": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    }
    result = new_result("stream", "make bench-stream", setup)
    with (
        tempfile.TemporaryDirectory(prefix="vtoken-bench-") as name,
        Engine(Path(name)) as engine,
        ApiServer(engine, Path(name)) as server,
    ):
        rows = [_measure(engine, server, n, seconds) for n in args.clients]
    title = f"{NUM_BLOCKS:,} blocks, msgpack, {seconds:g} s each"
    result.tables = [Table.of(title, [*rows, GOALS], *NOTES)]
    result.raw = rows
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0


def main(argv: list[str]) -> None:
    """Print the server's address, and serve until standard input ends."""
    with (
        tempfile.TemporaryDirectory(prefix="vtoken-bench-") as name,
        Engine(Path(name), int(argv[0])) as engine,
        ApiServer(engine, Path(name)) as server,
    ):
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
