"""The real core without vLLM: runtime, control plane and telemetry over a pool of numbered blocks.

Requests append one token a step, as a decoding engine's do; nothing is computed. What a test sees
through the API is therefore what the core really answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken import wire
from vtoken.arrays import Bools, Ints
from vtoken.config.values import default_config, merge_patch
from vtoken.control.controller import Controller
from vtoken.control.report import EngineFacts, Reporter
from vtoken.protocol.step import WorkerReport
from vtoken.runtime.runtime import GrownRequest, Runtime
from vtoken.stream.telemetry import Publisher
from vtoken.tables.token_table import TokenTable


@contextlib.asynccontextmanager
async def stepping_on(core: CoreEngine, pause_s: float = 0.02) -> AsyncIterator[None]:
    """`core` takes a step every `pause_s` seconds, as an engine does while requests run."""

    async def go() -> None:
        while True:
            core.step()
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(go())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass
class Pool:
    """A `BlockStore`: block 0 is never handed out, every block has one holder."""

    num_blocks: int
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))

    def num_free_blocks(self) -> int:
        return len(self.free)

    def is_writable(self, block: int) -> bool:
        return block not in self.free

    def is_shared(self, block: int) -> bool:
        del block
        return False

    def take(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert len(taken) == num_blocks
        return taken

    def rebind(self, request_id: str, blocks: Sequence[int]) -> None:
        self.tables[request_id] = list(blocks)

    def lend(self, num_blocks: int) -> list[int]:
        return list(self.free)[:num_blocks]

    def differences(self, tables: Iterable[TokenTable]) -> list[str]:
        return [
            f"the block table of {table.request_id} differs"
            for table in tables
            if table.blocks != self.tables[table.request_id]
        ]

    def give_back(self, blocks: Sequence[int]) -> None:
        assert not set(blocks) & set(self.free)
        self.free += blocks


class Words:
    """A `Vocabulary` of 97 words that follow one another: one special, every tenth punctuation."""

    def refusal(self) -> str | None:
        return None

    def words(self, request_id: str, ids: Ints) -> Ints:
        del request_id
        return ids % 97

    def special(self, words: Ints) -> Bools:
        return words == 0

    def punctuation(self, words: Ints) -> Bools:
        return words % 10 == 9


class CoreEngine:
    """`step()` it; `handle` answers commands, telemetry goes out after each."""

    def __init__(self, num_blocks: int = 64, block_size: int = 16) -> None:
        geometry = wire.Geometry(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=2,
            num_kv_heads=2,
            head_size=8,
            bytes_per_token=256,
        )
        self.pool = Pool(num_blocks)
        self.runtime = Runtime(
            geometry, self.pool, default_config(num_blocks), check_every_step=True
        )
        self.runtime.policy_runner.vocabulary = Words()
        facts = EngineFacts("e1", "0.1.0", "0.32.0", "core", "cpu")
        self.reporter = Reporter(self.runtime, facts, np.zeros(num_blocks, dtype=np.bool_))
        self.publisher = Publisher(self.runtime.events, max_hz=1000.0, max_share=float("inf"))
        self.controller = Controller(self.reporter, self.publisher.endpoint)
        self.tokens: dict[str, tuple[int, int]] = {}  # request -> tokens so far, prompt tokens

    def close(self) -> None:
        self.publisher.close()

    def handle(self, command: wire.Command) -> wire.Reply:
        reply = self.controller.handle(command)
        self.publisher.publish(self.controller.frame, force=True)
        return reply

    def configure(self, **patch: object) -> None:
        """Start from a configuration of one's own; leaves no revision behind."""
        geometry = self.runtime.geometry
        self.runtime.state.config = merge_patch(
            self.runtime.config,
            patch,
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
        )

    def admit(self, request_id: str, prompt_tokens: int) -> None:
        """A request whose prompt is computed in the next step."""
        self.runtime.latency.arrived(request_id, time.monotonic())
        self.tokens[request_id] = (0, prompt_tokens)
        self.pool.tables[request_id] = []

    def finish(self, request_id: str) -> None:
        self.runtime.release(request_id)
        self.pool.give_back(self.pool.tables.pop(request_id))
        del self.tokens[request_id]

    def step(self, steps: int = 1) -> None:
        """Every request gets its prompt, or one more token."""
        for _ in range(steps):
            self.controller.before_step()
            self.runtime.begin_step([key for key, (done, _) in self.tokens.items() if done])
            grown = [self._grow(request_id) for request_id in self.tokens]
            plan = self.runtime.commit_step(grown)
            report = WorkerReport(plan.step, moved_tokens=len(plan.source_slots))
            self.runtime.finish_step(report, plan.step)
            self.runtime.sampled(list(self.tokens), len(self.tokens), time.monotonic())
            self.reporter.facts.running = len(self.tokens)
            self.publisher.publish(self.controller.frame)

    def _grow(self, request_id: str) -> GrownRequest:
        done, prompt = self.tokens[request_id]
        new = 1 if done else prompt
        extent = self.runtime.required_extent(request_id, new)
        places = done + new if extent is None else extent
        blocks = self.pool.tables[request_id]
        missing = -(-places // self.runtime.geometry.block_size) - len(blocks)
        blocks += self.pool.take(max(0, missing))
        self.tokens[request_id] = (done + new, prompt)
        return GrownRequest(request_id, blocks, done + new, prompt, seed=0)
