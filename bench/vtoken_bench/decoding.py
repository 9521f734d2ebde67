"""Drive a `Runtime` through decode steps without an engine, and time its calls.

Block allocation is the engine's work and is not timed.
"""

from __future__ import annotations

import time
from typing import Any

from vtoken.base.arrays import Floats
from vtoken.core.config.values import VTokenConfig, default_config, merge_patch
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import StepPlan, WorkerReport
from vtoken.core.runtime.growth import Scheduled
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.selftest import Pool
from vtoken.wire import Geometry

BLOCK_SIZE = 16
SLACK_TOKENS = 256  # room of the pool beyond the prompts, per request
LAYERS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # of Llama-3.1-8B
KV_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 2  # per token, in bfloat16


class Calls:
    """The calls of one step: the engine's to the runtime and the worker's to its mirrors.

    Benchmarks use no other path into the runtime.
    """

    def __init__(self, runtime: Runtime, store: Pool, ids: list[str]) -> None:
        self.runtime, self.store, self.ids = runtime, store, ids

    def begin(self, ready: list[str]) -> None:
        self.runtime.begin_step(ready)

    def extents(self, counts: dict[str, int], num_new: int) -> list[int]:
        """Places that each request needs."""
        required_extent = self.runtime.required_extent
        return [required_extent(name, counts[name] + num_new) for name in self.ids]

    def commit(self, counts: dict[str, int]) -> StepPlan:
        known, tables = self.runtime.tables.rows, self.store.tables
        return self.runtime.commit_step(
            Scheduled(
                list(self.ids),
                [counts[name] for name in self.ids],
                [len(tables[name]) for name in self.ids],
                {
                    name: HeldRequest(name, counts[name], counts[name], seed=7)
                    for name in self.ids
                    if name not in known
                },
            )
        )

    def finish(self, plan: StepPlan, report: WorkerReport) -> None:
        self.runtime.finish_step(report, plan.step)

    def report(self, plan: StepPlan, scores: Floats | None, counts: dict[str, int]) -> WorkerReport:
        """A worker's report: all copies done, `scores` for every requested key."""
        copied = len(plan.source_slots), len(plan.park_slots), len(plan.restore_slots)
        report = WorkerReport(plan.step, 0, *copied)
        if scores is not None:
            report.scores = {key: scores[: counts[key[0]]] for key in plan.want_scores}
        return report

    def mirror(self, plan: StepPlan) -> None:
        """What the worker does with the plan, for benchmarks that have one."""


class Decoding:
    """`num_requests` prompts of `num_tokens` in one pool, ready to decode.

    `borrows_blocks`: blocks are borrowed for packing, as the CPU worker needs them. `scores`: the
    score of each token id, equal for all requests.
    """

    def __init__(
        self,
        num_requests: int,
        num_tokens: int,
        patch: dict[str, Any],
        *,
        borrows_blocks: bool = True,
        scores: Floats | None = None,
    ) -> None:
        num_blocks = 1 + num_requests * _blocks_of(num_tokens + SLACK_TOKENS)
        self.store = Pool(num_blocks)
        self.num_blocks = num_blocks
        self.scores = scores
        config = self.merged(default_config(num_blocks), {"evict_when": "always"} | patch)
        geometry = Geometry(num_blocks, BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_SIZE, KV_BYTES)
        shape = EngineShape(geometry, borrows_blocks=borrows_blocks)
        self.runtime = Runtime(shape, self.store, config)
        self.ids = [f"cmpl-{i:012x}-0" for i in range(num_requests)]
        self.calls = Calls(self.runtime, self.store, self.ids)
        self.num_tokens = dict.fromkeys(self.ids, 0)
        self.step([], num_tokens)

    def merged(self, config: VTokenConfig, patch: dict[str, Any]) -> VTokenConfig:
        return merge_patch(config, patch, num_blocks=self.num_blocks, num_layers=32)

    def configure(self, patch: dict[str, Any]) -> None:
        self.runtime.active.install(self.merged(self.runtime.config, patch))

    def step(self, ready: list[str], num_new: int = 1) -> list[float]:
        """Run one engine step of all requests; return µs of begin, ask, commit, finish."""
        calls, store, counts = self.calls, self.store, self.num_tokens
        clock = time.thread_time  # CPU time: other processes do not count
        t0 = clock()
        calls.begin(ready)
        t1 = clock()
        extents = calls.extents(counts, num_new)
        t2 = clock()
        for request_id, extent in zip(self.ids, extents, strict=True):
            counts[request_id] += num_new
            blocks = store.tables.setdefault(request_id, [])
            needed = _blocks_of(counts[request_id] if extent is None else extent)
            if needed > len(blocks):
                blocks += store.take(needed - len(blocks))
        t3 = clock()
        plan = calls.commit(counts)
        t4 = clock()
        calls.mirror(plan)
        report = calls.report(plan, self.scores, counts)
        t5 = clock()
        calls.finish(plan, report)
        t6 = clock()
        return [1e6 * t for t in (t1 - t0, t2 - t1, t4 - t3, t6 - t5)]

    def steps(self, count: int) -> list[list[float]]:
        return [self.step(self.ids) for _ in range(count)]


def _blocks_of(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` places."""
    return -(-num_tokens // BLOCK_SIZE)
