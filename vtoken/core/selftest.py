"""Start-up self-test: a small pool serves a few requests with the compiled kernels.

It compiles or loads every kernel of a step before requests arrive, and checks every intermediate
state against the equations of the tables. So cached code that differs from its source stops the
start. `python -m vtoken.core.selftest` fills the cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import replace

from vtoken.base.compiled import describe_kernels
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.config.values import default_config, merge_patch
from vtoken.core.planning.engine_shape import EngineShape
from vtoken.core.protocol.step import WorkerReport
from vtoken.core.runtime.growth import Scheduled
from vtoken.core.runtime.held_request import HeldRequest
from vtoken.core.runtime.runtime import Runtime
from vtoken.core.tables.token_table import TokenTable
from vtoken.wire import Geometry

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 40, 4, 2
PROMPT_TOKENS, NUM_STEPS = 30, 6
PROTECTED = ((5, 6), (9, 11))  # spans of one request
SHARED_BLOCKS = 3  # prefix cache hits of the second request
BUDGET = {"budget_tokens": 12, "interval_tokens": 2, "evict_when": "always"}
EAGER = {"theta_f": 0.0, "low_watermark_blocks": NUM_BLOCKS, "recycle": False}
RANDOM = {"policy": {"name": "random", "params": {"recent": 4}}}
PHASES: tuple[dict[str, Any], ...] = (
    RANDOM | {"reclamation": "paused"},  # holes, recycled
    {"policy": {"name": "streaming_llm"}},  # the oldest of many requests
    RANDOM | EAGER | {"experiment": {"planner": "plug"}},
    RANDOM | EAGER | {"experiment": {"planner": "pack"}, "verify_ratio": 1.0},
    RANDOM | EAGER | {"prefix_sharing": "copy"},  # out of shared blocks
    {"policy": {"name": "h2o"}, "reclamation": "off"},  # the lowest scores of many requests
    RANDOM | {"evict_when": "pressure", "headroom_blocks": NUM_BLOCKS // 2},  # blocks are short
    RANDOM | {"park_bytes": 1 << 12, "low_watermark_blocks": 0, "headroom_blocks": 0},
)


class Pool:
    """`BlockStore` of one small pool; `share` makes blocks shared and hashed."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.hashed = [False] * num_blocks
        self.free = deque(range(1, num_blocks))
        self.references = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}

    def share(self, block: int) -> int:
        """Add a holder to `block` and put it into the prefix cache."""
        self.references[block] += 1
        self.hashed[block] = True
        return block

    def num_free_blocks(self) -> int:
        return len(self.free)

    def is_writable(self, block: int) -> bool:
        return self.references[block] == 1 and not self.hashed[block]

    def first_not_writable(self, blocks: Sequence[int]) -> int | None:
        return next((block for block in blocks if not self.is_writable(block)), None)

    def is_shared(self, block: int) -> bool:
        return self.references[block] > 1

    def take(self, num_blocks: int) -> list[int]:
        taken = [self.free.popleft() for _ in range(num_blocks)]
        for block in taken:
            self.references[block], self.hashed[block] = 1, False
        return taken

    def borrow(self, num_blocks: int) -> list[int]:
        return list(islice(self.free, num_blocks))

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        self.tables[request_id] = list(blocks)

    def remove(self, request_id: str, runs: Sequence[tuple[int, int]]) -> None:
        for start, end in reversed(runs):
            del self.tables[request_id][start:end]

    def blocks_from(self, request_id: str, first: int) -> Sequence[int]:
        return self.tables[request_id][first:]

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        held = {table.request_id: table.blocks for table in tables}
        return [] if held == self.tables else [f"block tables {held}, expected {self.tables}"]


def run() -> str:
    """Serve a few requests under every phase; returns a line with time and compiled kernels.

    Raises InvariantViolation if a state is wrong.
    """
    started = time.perf_counter()
    for patch in PHASES:
        _Serving(BUDGET | patch).run()
    seconds = time.perf_counter() - started
    return f"self-test of the token tables: {seconds:.1f} s, {describe_kernels()}"


class _Serving:
    """Two requests of one pool under one configuration."""

    def __init__(self, patch: dict[str, Any]) -> None:
        self.pool = Pool()
        config = merge_patch(
            default_config(NUM_BLOCKS), patch, num_blocks=NUM_BLOCKS, num_layers=NUM_LAYERS
        )
        geometry = Geometry(NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, 1, 4, 64)
        self.runtime = Runtime(EngineShape(geometry), self.pool, config, check_every_step=True)
        self.num_tokens = {"a": 0, "b": 0}
        self.runtime.announce("b", RequestRules(protect=PROTECTED), num_prompt_tokens=PROMPT_TOKENS)

    def run(self) -> None:
        for number in range(NUM_STEPS):
            self._step(PROMPT_TOKENS if number == 0 else 1)
        if self.runtime.parking.num_parked:
            self.runtime.active.install(replace(self.runtime.config, budget_tokens=20))
            self._step(1)  # tokens come back
        tables = self.runtime.tables  # as if the newest token were a draft that was rejected
        tables.truncate(tables.all_rows, tables.columns.num_tokens[tables.all_rows] - 1)
        for name in self.num_tokens:
            self.runtime.release(name)

    def _step(self, num_new: int) -> None:
        runtime, names = self.runtime, list(self.num_tokens)
        runtime.begin_step(names)
        for name in names:
            self.num_tokens[name] += num_new
            total = self.num_tokens[name]
            extent = runtime.required_extent(name, total)
            if name not in self.pool.tables:
                first = self.pool.tables.get("a", [])[:SHARED_BLOCKS]
                self.pool.tables[name] = [self.pool.share(block) for block in first]
            blocks = self.pool.tables[name]
            blocks += self.pool.take(max(0, -(-(extent or total) // BLOCK_SIZE) - len(blocks)))
        totals = [self.num_tokens[name] for name in names]
        held = [len(self.pool.tables[name]) for name in names]
        new = {
            name: HeldRequest(name, PROMPT_TOKENS, PROMPT_TOKENS, seed=1)
            for name in names
            if num_new > 1
        }
        plan = runtime.commit_step(Scheduled(names, totals, held, new))
        report = WorkerReport(
            plan.step,
            moved_tokens=len(plan.source_slots),
            parked_tokens=len(plan.park_slots),
            restored_tokens=len(plan.restore_slots),
        )
        for name, signal in plan.want_scores:
            scores = np.arange(self.num_tokens[name], dtype=np.float32)
            report.scores[name, signal] = scores
        runtime.finish_step(report, plan.step)
        for table in runtime.tables:
            runtime.evictor.is_due(table, runtime.config)
        runtime.demand.givable_blocks()


if __name__ == "__main__":
    print(run())
