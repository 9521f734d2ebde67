"""Cost of the stream: bytes and lost frames per client, CPU of the API server and the engine.

The publisher runs in this process (70,000 blocks, 64 requests that decode and evict, a step every
30 ms), the API server in a second one, the clients in a third; no model runs. On a machine with few
cores the three compete for them: read the server's CPU time, not the clients' latency.

`--engines N`: a fleet instead, N such engines behind one API server, and clients that open a stream
of each, as the console's fleet page does. All engines are threads of one process here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import numpy as np
import zmq

from vtoken.control.controller import Controller
from vtoken.control.facts import EngineFacts
from vtoken.control.report import Reporter
from vtoken.control.telemetry import Publisher
from vtoken.wire import Frame
from vtoken_bench.decoding import BLOCK_SIZE, SLACK_TOKENS, Decoding
from vtoken_bench.output import FOLDER, Table, finish, new_result
from vtoken_bench.stream_clients import Counted

NUM_BLOCKS = 70_000
NUM_REQUESTS = 64
STEP_S = 0.03
FPS = 10
FLEET_FPS = 1  # of the console's fleet page
FLEET_TOPICS = "metrics,blocks"
GOAL_FPS = 9.0  # of 10 requested
GOAL_PERCENT = 1.0  # of the engine's thread


@dataclass(frozen=True, slots=True)
class Row:
    """One run; a second is one of wall time."""

    engines: int
    clients: int
    bytes_per_second: float  # per client, mean
    snapshot_bytes: int  # of one engine
    frames_per_second: float  # of the slowest stream
    missed_events: int  # summed over the clients
    gaps: int  # lost messages that no `dropped` message reports, summed
    server_cpu_percent: float  # of one core
    engine_share_percent: float  # of an engine thread's time, in publishing, mean
    frame_us: float  # the same, per frame
    steps_per_second: float  # of 33, mean; fewer if the machine is too slow
    sending_percent: float  # of one core, in ZMQ's own threads of the engines' process


class Engine:
    """The engine's thread: steps, publishes, and answers commands between two steps."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        num_tokens = NUM_BLOCKS // NUM_REQUESTS * BLOCK_SIZE - SLACK_TOKENS
        decoding = Decoding(NUM_REQUESTS, num_tokens, {"reclamation": "auto"})
        patch = {"policy": {"name": "random"}, "budget_tokens": num_tokens // 2}
        decoding.configure({**patch, "interval_tokens": 16})
        decoding.step(decoding.ids)
        self._decoding = decoding
        self._publisher = Publisher(decoding.runtime.events)
        hashed = np.zeros(decoding.num_blocks, dtype=np.bool_)
        facts = EngineFacts(f"bench-{rank}", "0", "0", "none", "cpu")
        reporter = Reporter(decoding.runtime, facts, hashed)
        self._controller = Controller(reporter, self._publisher.endpoint)
        self.endpoint = f"ipc://{folder / f'commands-{rank}'}"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.bind(self.endpoint)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{rank}")
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

    def __init__(self, engines: Sequence[Engine], folder: Path) -> None:
        module = [sys.executable, "-m", "vtoken_bench.api_server"]
        named = [word for engine in engines for word in ("--engine", engine.endpoint)]
        self._process = subprocess.Popen(
            [*module, *named, "--state-dir", str(folder / f"state-{len(engines)}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._port = int(self._line())

    def stream_url(self, **query: object) -> str:
        text = urlencode({"format": "msgpack", **query}, safe=",")
        return f"ws://127.0.0.1:{self._port}/vtoken/v1/stream?{text}"

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def cpu_s(self) -> float:
        """CPU time that the process has used so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("cpu\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the API server exited, see its messages above")
        return line


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU time [s] and counts of this process so far, summed over the engines."""

    at: float
    published_s: float
    sending_s: float  # outside of the engines' and the caller's threads
    server_s: float
    num_frames: int
    num_steps: int

    @classmethod
    def now(cls, engines: Sequence[Engine], server: ApiServer) -> Spent:
        server_s = server.cpu_s()
        threads_s = sum(engine.thread_s() for engine in engines) + time.thread_time()
        return cls(
            at=time.monotonic(),
            published_s=sum(engine.published_s for engine in engines),
            sending_s=time.process_time() - threads_s,
            server_s=server_s,
            num_frames=sum(engine.num_frames for engine in engines),
            num_steps=sum(engine.num_steps for engine in engines),
        )


def _measure(
    engines: Sequence[Engine],
    server: ApiServer,
    urls: Sequence[str],
    num_clients: int,
    seconds: float,
) -> Row:
    module = [sys.executable, "-m", "vtoken_bench.stream_clients"]
    with subprocess.Popen(
        [*module, str(num_clients), str(seconds), *urls],
        stdout=subprocess.PIPE,
        text=True,
    ) as clients:
        assert clients.stdout is not None
        if clients.stdout.readline() != "ready\n":
            raise RuntimeError("the clients exited, see their messages above")
        begin = Spent.now(engines, server)
        counted = msgspec.json.decode(clients.stdout.readline(), type=list[Counted])
        end = Spent.now(engines, server)
    elapsed, number = end.at - begin.at, len(engines)
    published_s = end.published_s - begin.published_s
    return Row(
        engines=number,
        clients=num_clients,
        bytes_per_second=sum(c.bytes for c in counted) / num_clients / seconds,
        snapshot_bytes=counted[0].snapshot_bytes,
        frames_per_second=min(c.state_messages for c in counted) / seconds,
        missed_events=sum(c.missed_events for c in counted),
        gaps=sum(c.gaps for c in counted),
        server_cpu_percent=100 * (end.server_s - begin.server_s) / elapsed,
        engine_share_percent=100 * published_s / elapsed / number,
        frame_us=1e6 * published_s / (end.num_frames - begin.num_frames),
        steps_per_second=(end.num_steps - begin.num_steps) / elapsed / number,
        sending_percent=100 * (end.sending_s - begin.sending_s) / elapsed,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--seconds", type=float, help="of each run (default 20, quick 3)")
    parser.add_argument("--engines", type=int, default=1, help="of a fleet, with its rate (1)")


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    seconds = args.seconds or (3.0 if args.quick else 20.0)
    setup = {
        "blocks": NUM_BLOCKS,
        "requests": NUM_REQUESTS,
        "frames a second asked for": FPS if args.engines == 1 else FLEET_FPS,
        "load before": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    }
    ranks, command, path = range(max(1, args.engines)), "make bench-stream", args.json
    if len(ranks) > 1:
        given = f"--engines {len(ranks)} --clients {' '.join(map(str, args.clients))}"
        command += f' ARGS="{given} --seconds {seconds:g}"'
        path = path or FOLDER / "stream-fleet.json"
    result = new_result("stream", command, setup)
    with tempfile.TemporaryDirectory(prefix="vtoken-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        engines = [stack.enter_context(Engine(folder, rank)) for rank in ranks]
        server = stack.enter_context(ApiServer(engines, folder))
        urls = [server.stream_url(fps=FPS)]
        if len(ranks) > 1:
            query = {"fps": FLEET_FPS, "topics": FLEET_TOPICS}
            urls = [server.stream_url(engine=rank, **query) for rank in ranks]
        rows = [_measure(engines, server, urls, n, seconds) for n in args.clients]
    result.tables = [_table(rows, seconds)]
    result.raw = [asdict(row) for row in rows]
    result.seconds = time.monotonic() - started
    finish(result, path=path, markdown=args.markdown)
    return 0


def _table(rows: Sequence[Row], seconds: float) -> Table:
    goal_fps, title = GOAL_FPS, f"{NUM_BLOCKS:,} blocks, msgpack, {seconds:g} s each"
    if rows[0].engines > 1:
        goal_fps *= FLEET_FPS / FPS
        title = f"{rows[0].engines} engines of {NUM_BLOCKS:,} blocks, {FLEET_FPS} state a second "
        title += f"of each to every client, msgpack, {seconds:g} s each"
    table = Table(
        title,
        ["clients", "KB/s a client", "KB a snapshot", "frames/s, slowest", "events missed",
         "gaps", "server CPU %", "engine %", "µs a frame", "steps/s", "sending %"],
        [["goal", None, None, f">= {goal_fps:g}", "0", "0", None, f"<= {GOAL_PERCENT:g}", None,
          None, None]],
        ["server CPU: of one core, the flight recorder in it; engine: of its thread's time, in "
         "publishing, and that a frame", "steps: of 33 a second, fewer where the machine has no "
         "time for them; sending: of one core, in ZMQ's own threads"],
    )  # fmt: skip
    if rows[0].engines > 1:
        table.notes.append(
            "engine and steps: means over the engines, which are threads of one process and wait "
            "for each other; server CPU: of all engines, a flight recorder each"
        )
    for row in rows:
        table.rows.append(
            [str(row.clients), row.bytes_per_second / 1e3, row.snapshot_bytes / 1e3,
             row.frames_per_second, row.missed_events, row.gaps, row.server_cpu_percent,
             row.engine_share_percent, row.frame_us, row.steps_per_second, row.sending_percent]
        )  # fmt: skip
    return table
