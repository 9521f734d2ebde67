"""Cost of telemetry on the engine's thread: without subscribers, and with one at the full rate.

The real publisher and reporter send over a real socket, for a pool of 70,000 blocks whose requests
have evicted half of their tokens; no model runs. The publisher makes at most 20 frames a second,
one in ten with metrics, and fewer where they would take more than `MAX_SHARE` of the time. The last
columns are calculated from that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import zmq

from vtoken.control.controller import Controller
from vtoken.control.facts import EngineFacts
from vtoken.control.report import Reporter
from vtoken.control.telemetry import MAX_SHARE, STATUS_EVERY, Publisher
from vtoken.wire import TOPIC_STATE
from vtoken_bench.decoding import BLOCK_SIZE, Decoding
from vtoken_bench.output import Cell, Table, finish, new_result

NUM_BLOCKS = 70_000
MAX_HZ = 20.0


def _measure(num_requests: int, count: int) -> dict[str, Cell]:
    """Medians in µs of CPU time of the engine's thread; bytes of one frame."""
    num_tokens = NUM_BLOCKS // num_requests * BLOCK_SIZE - 256
    engine = Decoding(num_requests, num_tokens, {"reclamation": "paused"})
    engine.configure({"policy": {"name": "random"}, "budget_tokens": num_tokens // 2})
    engine.step(engine.ids)
    runtime = engine.runtime
    facts = EngineFacts("bench", "0", "0", "none", "cpu")
    hashed = np.zeros(engine.num_blocks, dtype=np.bool_)
    controller = Controller(Reporter(runtime, facts, hashed))
    publisher = Publisher(runtime.events, max_hz=MAX_HZ)

    def publish_map() -> None:
        publisher.publish(lambda with_status: controller.frame(with_status=False), force=True)  # noqa: ARG005

    def publish_figures() -> None:
        publisher.publish(controller.frame, force=True)

    try:
        silent = _times(lambda: publisher.publish(controller.frame), count)
        subscriber: zmq.Socket[bytes]
        with zmq.Context.instance().socket(zmq.SUB) as subscriber:
            subscriber.subscribe(TOPIC_STATE)
            subscriber.connect(publisher.endpoint)
            while not _drain(subscriber):  # until the subscription has arrived
                publish_figures()

            def measure(publish: Callable[[], None]) -> tuple[float, int]:
                times, size = [], 0
                for _ in range(count):
                    engine.step(engine.ids)
                    times += _times(publish, 1)
                    size = _drain(subscriber)
                return float(np.median(times)), size

            (map_us, map_bytes), (figures_us, figures_bytes) = map(
                measure, (publish_map, publish_figures)
            )
    finally:
        publisher.close()
    frame_us = map_us + (figures_us - map_us) / STATUS_EVERY  # mean: one in so many has figures
    frames = min(MAX_HZ, MAX_SHARE * 1e6 / frame_us)
    return {
        "requests": str(num_requests),
        "nobody listens, µs a step": float(np.median(silent)),
        "µs a frame": map_us,
        "bytes": map_bytes,
        "with figures, µs": figures_us,
        "with figures, bytes": figures_bytes,
        "frames a second": frames,
        "% of the time, one client": frame_us * frames / 1e4,
    }


def _drain(subscriber: zmq.Socket[bytes]) -> int:
    """Receive all pending messages; return the bytes of the last one."""
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
    title = f"{NUM_BLOCKS:,} blocks: CPU time of the engine's thread"
    result.tables, result.raw = [Table.of(title, rows)], rows
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    return 0
