"""Requests that decode, without an engine: a `Runtime` driven step by step, its calls timed.

Allocation is the engine's and is not timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from vtoken.config.values import VTokenConfig, default_config, merge_patch
from vtoken.protocol.step import WorkerReport
from vtoken.runtime.runtime import NewRequest, Runtime, Scheduled
from vtoken.tables.token_table import TokenTable
from vtoken.wire import Geometry

BLOCK_SIZE = 16
SLACK_TOKENS = 256  # that the pool can take beyond the prompts, a request


class Store:
    """`BlockStore` over lists, without prefix cache: every held block is private and writable."""

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))
        self.hashed = np.zeros(num_blocks, dtype=np.bool_)
        self.tables: dict[str, list[int]] = {}

    def num_free_blocks(self) -> int:
        return len(self.free)

    def is_writable(self, block: int) -> bool:
        return block != 0

    def first_not_writable(self, blocks: Sequence[int]) -> int | None:
        return 0 if 0 in blocks else None

    def is_shared(self, block: int) -> bool:  # noqa: ARG002
        return False

    def take(self, num_blocks: int) -> list[int]:
        return [self.free.popleft() for _ in range(num_blocks)]

    def lend(self, num_blocks: int) -> list[int]:
        return list(islice(self.free, num_blocks))

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        self.tables[request_id] = list(blocks)

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:  # noqa: ARG002
        return []  # nothing is checked while it is timed

    def give_back(self, blocks: Sequence[int]) -> None:
        self.free.extendleft(blocks)

    def blocks_from(self, request_id: str, first: int) -> Sequence[int]:
        return self.tables[request_id][first:]


class Decoding:
    """`num_requests` prompts of `num_tokens` in one pool, ready to decode."""

    def __init__(self, num_requests: int, num_tokens: int, patch: dict[str, Any]) -> None:
        blocks_each = -(-(num_tokens + SLACK_TOKENS) // BLOCK_SIZE)
        num_blocks = 1 + num_requests * blocks_each
        self.store = Store(num_blocks)
        self.num_blocks = num_blocks
        config = self.merged(default_config(num_blocks), patch)
        geometry = Geometry(num_blocks, BLOCK_SIZE, 32, 8, 128, 32 * 2 * 8 * 128 * 2)
        self.runtime = Runtime(geometry, self.store, config)
        self.ids = [f"cmpl-{i:012x}-0" for i in range(num_requests)]
        self.num_tokens = dict.fromkeys(self.ids, 0)
        self.step([], num_tokens)

    def merged(self, config: VTokenConfig, patch: dict[str, Any]) -> VTokenConfig:
        return merge_patch(config, patch, num_blocks=self.num_blocks, num_layers=32)

    def configure(self, patch: dict[str, Any]) -> None:
        self.runtime.state.install(self.merged(self.runtime.config, patch))

    def step(self, ready: list[str], num_new: int = 1) -> list[float]:
        """One engine step of all requests; µs of begin, ask, commit, finish."""
        runtime, store, counts = self.runtime, self.store, self.num_tokens
        clock = time.thread_time  # CPU time: other processes do not count
        t0 = clock()
        runtime.begin_step(ready)
        t1 = clock()
        places = [runtime.required_extent(name, counts[name] + num_new) for name in self.ids]
        t2 = clock()
        for request_id, extent in zip(self.ids, places, strict=True):
            counts[request_id] += num_new
            blocks = store.tables.setdefault(request_id, [])
            needed = -(-(counts[request_id] if extent is None else extent) // BLOCK_SIZE)
            if needed > len(blocks):
                blocks += store.take(needed - len(blocks))
        t3 = clock()
        known = runtime.tables.rows
        plan = runtime.commit_step(
            Scheduled(
                list(self.ids),
                [counts[name] for name in self.ids],
                [len(store.tables[name]) for name in self.ids],
                {name: NewRequest(counts[name], 7) for name in self.ids if name not in known},
            )
        )
        t4 = clock()
        runtime.finish_step(WorkerReport(plan.step, moved_tokens=len(plan.source_slots)), plan.step)
        t5 = clock()
        return [1e6 * t for t in (t1 - t0, t2 - t1, t4 - t3, t5 - t4)]

    def steps(self, count: int) -> list[list[float]]:
        return [self.step(self.ids) for _ in range(count)]
