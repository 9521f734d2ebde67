"""What telemetry costs the engine's thread: nobody listening, and one subscriber at the full rate.

The real publisher and reporter over a real socket, on a pool of 70,000 blocks whose requests have
evicted half of their tokens; nothing is computed. Frames are made 20 times a second at most, and
less often where they would take more than 1% of the time: the last columns are what follows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import zmq

from vtoken.bench.decoding import BLOCK_SIZE, Decoding
from vtoken.bench.output import Table, finish, new_result
from vtoken.control import Controller
from vtoken.report import EngineFacts, Reporter
from vtoken.telemetry import MAX_SHARE, Publisher
from vtoken.wire import TOPIC_EVENTS, TOPIC_STATE

NUM_BLOCKS = 70_000
MAX_HZ = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in µs of CPU time of the engine's thread; bytes of one frame."""

    requests: int
    silent_us: float
    frame_us: float
    frame_p95_us: float
    frame_bytes: int

    @property
    def frames_per_second(self) -> float:
        return min(MAX_HZ, MAX_SHARE * 1e6 / self.frame_us)

    @property
    def share_percent(self) -> float:
        return self.frame_us * self.frames_per_second / 1e6 * 100


def _measure(num_requests: int, count: int) -> Row:
    num_tokens = NUM_BLOCKS // num_requests * BLOCK_SIZE - 256
    engine = Decoding(num_requests, num_tokens, {"reclamation": "paused"})
    engine.configure({"policy": {"name": "random"}, "budget_tokens": num_tokens // 2})
    engine.step(engine.ids)
    runtime = engine.runtime
    facts = EngineFacts("bench", "0", "0", "none", "cpu")
    hashed = np.zeros(engine.num_blocks, dtype=np.bool_)
    controller = Controller(Reporter(runtime, facts, hashed))
    publisher = Publisher(runtime.events, max_hz=MAX_HZ)

    def publish(force: bool) -> None:
        publisher.publish(controller.frame, force=force)

    try:
        silent = _times(lambda: publish(False), count)
        subscriber: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.SUB) as subscriber:
            subscriber.subscribe(TOPIC_STATE)
            subscriber.subscribe(TOPIC_EVENTS)
            subscriber.connect(publisher.endpoint)
            size = 0
            while not size:  # the subscription travels
                publish(True)
                size = _drain(subscriber)
            times = []
            for _ in range(count):
                engine.step(engine.ids)
                times += _times(lambda: publish(True), 1)
                _drain(subscriber)
    finally:
        publisher.close()
    return Row(
        num_requests,
        float(np.median(silent)),
        float(np.median(times)),
        float(np.percentile(times, 95)),
        size,
    )


def _drain(subscriber: zmq.Socket[bytes]) -> int:
    """Receive what has arrived; the bytes of the last message."""
    size = 0
    while subscriber.poll(20 if not size else 0):
        size = sum(map(len, subscriber.recv_multipart()))
    return size


def _times(call: Callable[[], None], count: int) -> list[float]:
    """CPU time of each of `count` calls, in µs."""
    times = []
    for _ in range(count):
        started = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - started) / 1e3)
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    setup = {"blocks": NUM_BLOCKS, "frames a second at most": MAX_HZ}
    result = new_result("telemetry", "make bench-telemetry", setup)
    rows = [_measure(n, 20 if args.quick else 200) for n in args.requests]
    table = Table(
        f"{NUM_BLOCKS:,} blocks: CPU time of the engine's thread",
        ["requests", "nobody listens, µs a step", "µs a frame", "p95", "bytes a frame",
         "frames a second", "% of the time, one client"],
        [],
    )  # fmt: skip
    for row in rows:
        table.rows.append(
            [str(row.requests), row.silent_us, row.frame_us, row.frame_p95_us, row.frame_bytes,
             row.frames_per_second, row.share_percent]
        )  # fmt: skip
    result.tables = [table]
    result.raw = [asdict(row) for row in rows]
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0
