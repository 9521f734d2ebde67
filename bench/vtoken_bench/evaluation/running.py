"""Runs comparisons: what is measured is logged at once, every load on an engine of its own.

1. A point that is in the log under the same key is not measured again.
2. Repeats go forwards and backwards in turn.
3. Comparisons go repeat by repeat: what ends a run early leaves whole repeats of all.
4. Whatever ends a run early, what is finished is in the log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from statistics import median
from typing import Any, Protocol

from vtoken_bench.engines import Engine, ask_in_turns
from vtoken_bench.evaluation.bursts import Bursts
from vtoken_bench.evaluation.chats import FactChats
from vtoken_bench.evaluation.conversations import Conversations
from vtoken_bench.evaluation.points import Comparison, EngineSpec, Point, Run
from vtoken_bench.evaluation.prose import Prose, set_arrivals
from vtoken_bench.evaluation.variants import configuration
from vtoken_bench.log import Log
from vtoken_bench.progress import Progress
from vtoken_bench.target import DEMO, ModelShape, Target, model_folder

WARM_UP = Prose(64, 8)
JUDGED = (FactChats, Bursts, Conversations)  # workloads whose outputs are searched for facts
STARTS_AT_ONCE = 2  # engines; their loads run one at a time
# What a load takes, start of its engine included, before one was measured here.
SECONDS_EACH, SLOW_SECONDS_EACH = {DEMO: 6.0}, 80.0


class Loads(Protocol):
    """Runs loads: on engines in their own processes, or on servers under a client.

    `key`: what figures depend on beside their point. `most_together`: that many loads are one call
    of `together`; a larger comparison is measured load by load.
    """

    @property
    def key(self) -> dict[str, Any]: ...

    @property
    def most_together(self) -> int: ...

    def together(self, points: Sequence[Point], repeat: int) -> list[dict[str, Any]]:
        """The figures of loads of one repeat."""


class Engines:
    """`most_together`: that many loads take turns, 1 where no two engines fit."""

    def __init__(self, target: Target, most_together: int) -> None:
        self._target, self.most_together = target, most_together
        self.key = asdict(target)

    def _started(self, spec: EngineSpec) -> Engine:
        """An engine of `spec` that has served two requests."""
        name = f"{spec.model}, {'stock vLLM' if spec.stock else 'vToken'}"
        blocks = f"{spec.num_blocks} blocks of {spec.block_size}"
        print(f"starting {name}, {blocks}", file=sys.stderr, flush=True)
        folder = model_folder(spec.model)
        args = self._target.engine_args(
            folder,
            block_size=spec.block_size,
            max_model_len=spec.max_model_len,
            num_blocks=spec.num_blocks,
            **spec.others,
        )
        settings = self._target.settings()
        config = None if spec.stock else {"policy": {"name": "none"}}
        engine = Engine(name, config, args, threads=self._target.threads, settings=settings)
        engine.ask({"requests": WARM_UP.requests(folder, 2, 0)})
        return engine

    def together(self, points: Sequence[Point], repeat: int) -> list[dict[str, Any]]:
        """Run the loads in turns, each on a new engine. Raises EngineError when one dies."""
        questions = [self._question(point, repeat) for point in points]
        with ExitStack() as started, ThreadPoolExecutor(STARTS_AT_ONCE) as starts:

            def start(point: Point) -> Engine:
                return started.enter_context(closing(self._started(point.engine)))

            engines = [*starts.map(start, points)]
            replies = ask_in_turns([*zip(engines, questions, strict=True)])
        for point, reply in zip(points, replies, strict=True):
            if isinstance(point.workload, JUDGED):
                folder, outputs = model_folder(point.engine.model), reply.pop("output_ids")
                reply["found"] = point.workload.found(folder, repeat, outputs)
        return replies

    def _question(self, point: Point, repeat: int) -> dict[str, Any]:
        """For the engine's worker."""
        spec, folder = point.engine, model_folder(point.engine.model)
        requests = point.workload.requests(folder, point.num_requests, repeat)
        if point.rate is not None:
            set_arrivals(requests, point.rate, repeat)
        question: dict[str, Any] = {
            "requests": requests,
            "concurrency": point.concurrency,
            "max_running": point.max_running,
            "keep_tokens": isinstance(point.workload, JUDGED),
        }
        if not spec.stock:
            token_bytes = ModelShape.of(folder).token_bytes(self._target.number_bytes)
            block_bytes = spec.block_size * token_bytes
            question["config"] = configuration(point.config, spec.num_blocks, block_bytes)
        return question


def measure(comparisons: Sequence[Comparison], log: Log, loads: Loads, title: str) -> list[Run]:
    """Every point of every comparison, as often as each says."""
    groups = [
        (comparison, repeat, _in_order(comparison, repeat))
        for comparison in comparisons
        for repeat in range(comparison.first, comparison.repeats)
    ]
    groups.sort(key=lambda group: group[1])
    orders = [(point, repeat) for _, repeat, points in groups for point in points]
    known = sum(log.get(point.key(repeat) | loads.key) is not None for point, repeat in orders)
    progress = Progress(title, len(orders), known)
    if orders:
        each = _seconds_each(orders[0][0].engine.model, log)
        minutes = (len(orders) - known) * each / 60
        print(
            f"{title}: {len(orders) - known} of {len(orders)} loads to measure, about "
            f"{minutes:.0f} min at {each:.0f} s a load, starts of engines included",
            file=sys.stderr,
            flush=True,
        )
    for comparison, repeat, points in groups:
        missing = [p for p in points if log.get(p.key(repeat) | loads.key) is None]
        whole = [points] if missing and len(points) <= loads.most_together else []
        for group in whole or [[point] for point in missing]:
            started = time.monotonic()
            for point, found in zip(group, loads.together(group, repeat), strict=True):
                seconds = (time.monotonic() - started) / len(group)
                log.add(point.key(repeat) | loads.key, found, seconds)
            progress.step(
                f"{comparison.name}, repeat {repeat + 1}", len(missing) if whole else len(group)
            )
    return [_run(point, repeat, log, loads) for point, repeat in orders]


def _in_order(comparison: Comparison, repeat: int) -> list[Point]:
    """The points forwards and backwards in turn."""
    return [*comparison.points] if repeat % 2 == 0 else [*comparison.points][::-1]


def _run(point: Point, repeat: int, log: Log, loads: Loads) -> Run:
    entry = log.entry(point.key(repeat) | loads.key)
    assert entry is not None
    return Run(point.labels, repeat, entry.value, entry.seconds, entry.at, entry.commit)


def _seconds_each(model: str, log: Log) -> float:
    """What a load of this part on this model took in the median; a guess before the first."""
    earlier = [
        entry.seconds
        for entry in log.entries()
        if entry.key.get("engine", {}).get("model") == model and entry.seconds
    ]
    return median(earlier) if earlier else SECONDS_EACH.get(model, SLOW_SECONDS_EACH)
