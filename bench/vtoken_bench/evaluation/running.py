"""Runs comparisons: engines are kept while they are needed, what is measured is logged at once.

1. A point that is in the log under the same key is not measured again.
2. Within a comparison repeats are interleaved, forwards and backwards in turn.
3. Comparisons of speeds go repeat by repeat: what ends a run early leaves whole repeats of all.
4. Whatever ends a run early, what is finished is in the log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from vtoken_bench.engines import Engine, ask_in_turns
from vtoken_bench.evaluation.chats import FactChats
from vtoken_bench.evaluation.points import Comparison, EngineSpec, Point, Run
from vtoken_bench.evaluation.variants import configuration
from vtoken_bench.evaluation.workloads import Workload, requests, set_arrivals
from vtoken_bench.log import Log
from vtoken_bench.target import DEMO, Target, model_folder

WARM_UP = [(64, 8), (64, 8)]  # prompt and output tokens
# What a load takes, start of its engine included, before one was measured here.
SECONDS_EACH, SLOW_SECONDS_EACH = {DEMO: 6.0}, 80.0


class Loads(Protocol):
    """Runs loads: on engines in their own processes, or on servers under a client.

    `key`: what figures depend on beside their point. `most_together`: that many loads of a
    comparison of speeds are one call of `together`; a larger comparison is measured load by load.
    """

    @property
    def key(self) -> dict[str, Any]: ...

    @property
    def most_together(self) -> int: ...

    def close(self) -> None:
        """The next load starts its engine anew."""

    def load(self, point: Point, repeat: int) -> dict[str, Any]:
        """The figures of one load."""

    def together(self, points: Sequence[Point], repeat: int) -> list[dict[str, Any]]:
        """The figures of the loads of one repeat, each on an engine of its own."""


class Engines:
    """At most `most` engines at a time; the one that was used longest ago makes room.

    `most_together`: that many loads take turns, 0 where no two engines fit.
    """

    def __init__(self, target: Target, most: int, most_together: int) -> None:
        self._target, self._most, self.most_together = target, most, most_together
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
        settings = self._target.settings() | {"calibration": "off"}  # not this user's profile
        if spec.copy_sync:
            settings["experiment"] = {"copy_sync": True}
        config = None if spec.stock else {"policy": {"name": "none"}}
        threads = spec.threads or self._target.threads
        engine = Engine(name, config, args, threads=threads, settings=settings)
        engine.ask({"requests": requests(model_folder(spec.model), WARM_UP, 0, keep=None)})
        return engine

    def load(self, point: Point, repeat: int) -> dict[str, Any]:
        """Run the point's load on its engine. Raises EngineError when the engine dies."""
        question = self._question(point, repeat)
        return _with_answers(point, repeat, question, self.get(point.engine).ask(question))

    def together(self, points: Sequence[Point], repeat: int) -> list[dict[str, Any]]:
        """Run the loads in turns, each on a new engine of its own. Raises EngineError."""
        self.close()
        with ExitStack() as started:
            asked = [
                (started.enter_context(closing(self._started(p.engine))), self._question(p, repeat))
                for p in points
            ]
            replies = ask_in_turns(asked)
        return [
            _with_answers(point, repeat, question, reply)
            for point, (_, question), reply in zip(points, asked, replies, strict=True)
        ]

    def _question(self, point: Point, repeat: int) -> dict[str, Any]:
        """For the engine's worker."""
        question: dict[str, Any] = {
            "requests": _requests(point, model_folder(point.engine.model), repeat),
            "concurrency": point.concurrency,
            "max_running": point.max_running,
            "sample_every": point.sample_every,
            "stop_on_overflow": point.stop_on_overflow,
            "own_bytes": point.own_bytes,
            "keep_tokens": point.keep_tokens or isinstance(point.workload, FactChats),
            "natural_end": point.questions or point.continues,
        }
        if not point.engine.stock:
            question["config"] = configuration(point.config, point.engine.num_blocks)
        return question


def _with_answers(
    point: Point, repeat: int, question: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """The figures of a load, with what its outputs are judged by."""
    if isinstance(point.workload, FactChats):
        folder, outputs = model_folder(point.engine.model), found.pop("output_ids")
        found["found"] = point.workload.found(folder, repeat, outputs)
    if point.continues:
        found["reference_ids"] = [request["reference"] for request in question["requests"]]
    return found


def _requests(point: Point, folder: Path, repeat: int) -> list[dict[str, Any]]:
    workload, count = point.workload, point.num_requests
    if isinstance(workload, Workload):
        found = requests(
            folder,
            workload.sizes(count, repeat),
            repeat,
            keep=point.keep,
            shared=point.shared,
            questions=point.questions,
            continues=point.continues,
        )
    else:
        found = workload.requests(folder, count, repeat)
    if point.rate is not None:
        set_arrivals(found, point.rate, repeat)
    return found


class Progress:
    """One line a step on stderr: how many of how many, and how long the rest may take."""

    def __init__(self, title: str, total: int, known: int) -> None:
        self._title, self._total, self._done, self._known = title, total, 0, known
        self._started = time.monotonic()

    def step(self, what: str, count: int = 1) -> None:
        self._done += count
        spent = time.monotonic() - self._started
        rest = spent / self._done * (self._total - self._known - self._done)
        at = f"{self._known + self._done} of {self._total}"
        line = f"{self._title}: {at}, about {rest / 60:.0f} min left; {what}"
        print(line, file=sys.stderr, flush=True)


def measure(comparisons: Sequence[Comparison], log: Log, engines: Loads, title: str) -> list[Run]:
    """Every point of every comparison, as often as each says."""
    groups = [
        (comparison, repeat, _in_order(comparison, repeat))
        for comparison in comparisons
        for repeat in range(comparison.first, comparison.repeats)
    ]
    if all(comparison.fresh for comparison in comparisons):  # no engine would be kept
        groups.sort(key=lambda group: group[1])
    orders = [(point, repeat) for _, repeat, points in groups for point in points]
    known = sum(log.get(point.key(repeat) | engines.key) is not None for point, repeat in orders)
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
        keys = [point.key(repeat) | engines.key for point in points]
        missing = [n for n, key in enumerate(keys) if log.get(key) is None]
        if comparison.fresh and missing and len(points) <= engines.most_together:
            started = time.monotonic()
            for key, found in zip(keys, engines.together(points, repeat), strict=True):
                log.add(key, found, (time.monotonic() - started) / len(points))
            progress.step(f"{comparison.name}, repeat {repeat + 1}", len(missing))
            continue
        for n in missing:
            if comparison.fresh:
                engines.close()
            started = time.monotonic()
            log.add(keys[n], engines.load(points[n], repeat), time.monotonic() - started)
            labels = ", ".join(str(value) for value in points[n].labels.values())
            progress.step(f"{comparison.name}: {labels}, repeat {repeat + 1}")
    return [_run(point, repeat, log, engines) for point, repeat in orders]


def _in_order(comparison: Comparison, repeat: int) -> list[Point]:
    """The points forwards and backwards in turn."""
    return [*comparison.points] if repeat % 2 == 0 else [*comparison.points][::-1]


def _run(point: Point, repeat: int, log: Log, engines: Loads) -> Run:
    entry = log.entry(point.key(repeat) | engines.key)
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
