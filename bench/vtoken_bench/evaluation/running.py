"""Runs comparisons: engines are kept while they are needed, what is measured is logged at once.

1. A point that is in the log under the same key is not measured again.
2. Within a comparison repeats are interleaved, forwards and backwards in turn.
3. Whatever ends a run early, what is finished is in the log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from vtoken_bench.engines import Engine
from vtoken_bench.evaluation.points import Comparison, EngineSpec, Point, Run
from vtoken_bench.evaluation.variants import configuration
from vtoken_bench.evaluation.workloads import requests
from vtoken_bench.log import Log
from vtoken_bench.target import Target, model_folder

WARM_UP = [(64, 8), (64, 8)]  # prompt and output tokens


class Engines:
    """At most `most` engines at a time; the one that was used longest ago makes room."""

    def __init__(self, target: Target, most: int) -> None:
        self._target, self._most = target, most
        self.key = asdict(target)  # what figures depend on beside their point
        self._open: dict[EngineSpec, Engine] = {}

    def close(self) -> None:
        """End all of them; the next load starts its engine anew."""
        for engine in self._open.values():
            engine.close()
        self._open.clear()

    def get(self, spec: EngineSpec) -> Engine:
        """The engine of `spec`, started now if need be; a new one has served two requests."""
        engine = self._open.pop(spec, None)
        if engine is None:
            while len(self._open) >= self._most:
                self._open.pop(next(iter(self._open))).close()
            engine = self._started(spec)
            warm_up = requests(model_folder(spec.model), WARM_UP, 0, keep=None)
            engine.ask({"requests": warm_up})
        self._open[spec] = engine
        return engine

    def _started(self, spec: EngineSpec) -> Engine:
        name = f"{spec.model}, {'stock vLLM' if spec.stock else 'vToken'}"
        blocks = f"{spec.num_blocks} blocks of {spec.block_size}"
        print(f"starting {name}, {blocks}", file=sys.stderr, flush=True)
        target = self._target if spec.dtype is None else replace(self._target, dtype=spec.dtype)
        args = target.engine_args(
            model_folder(spec.model),
            block_size=spec.block_size,
            max_model_len=spec.max_model_len,
            num_blocks=spec.num_blocks,
            enable_prefix_caching=spec.prefix_caching,
        )
        settings = self._target.settings()
        if spec.copy_sync:
            settings["experiment"] = {"copy_sync": True}
        config = None if spec.stock else {"policy": {"name": "none"}}
        return Engine(name, config, args, threads=self._target.threads, settings=settings)

    def load(self, point: Point, repeat: int) -> dict[str, Any]:
        """Run the point's load on its engine. Raises RuntimeError when the engine dies."""
        folder = model_folder(point.engine.model)
        question: dict[str, Any] = {
            "requests": requests(
                folder,
                point.workload.sizes(point.num_requests, repeat),
                repeat,
                keep=point.keep,
                shared=point.shared,
                rate=point.rate,
                questions=point.questions,
            ),
            "concurrency": point.concurrency,
            "sample_every": point.sample_every,
            "stop_on_overflow": point.stop_on_overflow,
            "keep_tokens": point.keep_tokens,
            "natural_end": point.questions,
        }
        if not point.engine.stock:
            question["config"] = configuration(point.config, point.engine.num_blocks)
        return self.get(point.engine).ask(question)


class Progress:
    """One line a point on stderr: how many of how many, and how long the rest may take."""

    def __init__(self, title: str, total: int, known: int) -> None:
        self._title, self._total, self._done, self._known = title, total, 0, known
        self._started = time.monotonic()

    def step(self, what: str) -> None:
        self._done += 1
        spent = time.monotonic() - self._started
        rest = spent / self._done * (self._total - self._known - self._done)
        at = f"{self._known + self._done} of {self._total}"
        line = f"{self._title}: {at}, about {rest / 60:.0f} min left; {what}"
        print(line, file=sys.stderr, flush=True)


def measure(comparisons: Sequence[Comparison], log: Log, engines: Engines, title: str) -> list[Run]:
    """Every point of every comparison, as often as each says."""
    orders = [
        (comparison, repeat, point)
        for comparison in comparisons
        for repeat in range(comparison.repeats)
        for point in (comparison.points if repeat % 2 == 0 else [*comparison.points][::-1])
    ]
    known = sum(log.get(point.key(repeat) | engines.key) is not None for _, repeat, point in orders)
    progress = Progress(title, len(orders), known)
    runs = []
    before: tuple[str, int] | None = None
    for comparison, repeat, point in orders:
        if comparison.fresh and before != (comparison.name, repeat):
            engines.close()
        before = comparison.name, repeat
        key = point.key(repeat) | engines.key
        found = log.get(key)
        if found is None:
            started = time.monotonic()
            found = engines.load(point, repeat)
            log.add(key, found, time.monotonic() - started)
            labels = ", ".join(str(value) for value in point.labels.values())
            progress.step(f"{comparison.name}: {labels}, repeat {repeat + 1}")
        runs.append(Run(point.labels, repeat, found, log.seconds(key)))
    return runs
