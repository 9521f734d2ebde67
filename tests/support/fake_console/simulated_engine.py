"""TEST ONLY: the engine behind the test server: a simulated pool, its clock, its events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from tests.support.fake_console.fake_control import Control
from tests.support.fake_console.pool_simulation import Pool, SimRequest
from vtoken import wire

BYTES_PER_TOKEN = 4608


class SimulatedEngine:
    """`tick` is one step. `patches`, `compactions`, `undos` record what clients asked for."""

    def __init__(
        self,
        *,
        num_blocks: int = 800,
        block_size: int = 16,
        num_requests: int = 12,
        can_control: bool = True,
        token: str | None = None,
        seed: int = 1,
        port: int = 0,
        step_s: float = 0.05,
        prompt: int = 180,
        limit: int = 900,
        epoch: str = "epoch-1",
        tells_owners: bool = True,
    ) -> None:
        self.pool = Pool(num_blocks, block_size, seed)
        self.num_requests, self.can_control, self.token = num_requests, can_control, token
        self.port, self.step_s, self.prompt, self.limit = port, step_s, prompt, limit
        self.epoch = epoch
        self.tells_owners = tells_owners  # an older server does not
        self.step = self.serial = 0
        self.frozen = False  # no steps, so that a picture stands still
        self.hung = False  # says nothing any more; its server still beats
        self.config = wire.ConfigValues(
            policy=wire.PolicyChoice(name="h2o", params={"recent_ratio": 0.5, "sinks": 4}),
            theta_f=0.25,
            batch_size=32,
            low_watermark_blocks=num_blocks // 8,
            headroom_blocks=8,
            planner="plug",
            reclamation="auto",
            recycle=False,
            budget_tokens=256,
            interval_tokens=64,
            probe=wire.Probe(every_steps=4),
        )
        self.health: list[wire.Health] = []
        self.revision = 1
        self.history: list[wire.ConfigValues] = []
        self.control = Control(self)
        self.config_version = 0  # rises where the document changes and its revision does not
        self.events: list[wire.Event] = []
        self.operations: dict[str, wire.Operation] = {}
        self.patches: list[tuple[dict[str, Any], bool, str | None]] = []
        self.compactions: list[dict[str, Any]] = []
        self.undos = 0
        self.skip_seq = 0  # the next message of every stream skips this many numbers
        self.event_storm = 0  # events sent before each delta
        self.event("server", "test server started")

    def event(self, kind: wire.EventKind, summary: str, **data: Any) -> None:
        seq = self.events[-1].seq + 1 if self.events else 1
        self.events.append(
            wire.Event(
                seq=seq, ts=time.time(), step=self.step, kind=kind, summary=summary, data=data
            )
        )

    def _fill(self) -> None:
        rng = self.pool.rng
        while len(self.pool.requests) < self.num_requests:
            self.serial += 1
            name = f"cmpl-{rng.integers(1 << 32):08x}"
            prompt = int(rng.integers(self.prompt // 2, self.prompt * 2))
            if not self.pool.add(name, prompt, int(rng.integers(self.limit // 2, self.limit * 2))):
                break
        self.pool.refresh()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not (self.frozen or self.hung):
                self.tick()

    def tick(self) -> None:
        self.step += 1
        self.pool.step(1)
        if self.step % 7 == 0:
            self._fill()
        if self.config.policy.name != "none":
            evicted = self.pool.evict(self.config.budget_tokens, self.config.interval_tokens)
            if evicted:
                self.event(
                    "eviction",
                    f"evicted {evicted} tokens",
                    tokens=evicted,
                    requests=1,
                    policy=self.config.policy.name,
                )
        if self.config.reclamation == "auto" and self.f() > self.config.theta_f:
            request = max(self.pool.requests.values(), key=lambda r: self.pool.plan(r)[1])
            if self.pool.plan(request)[1] > 0:
                self.relocate(request, "auto")
        self.pool.refresh()
        self.control.tick()

    def relocate(self, request: SimRequest, reason: str) -> tuple[int, int]:
        before = len(self.pool.free)
        sources, into, moved = self.pool.compact(request, self.config.batch_size)
        freed = len(self.pool.free) - before
        data = wire.Relocation(
            request_id=request.id,
            moved_tokens=moved,
            moved_bytes=moved * BYTES_PER_TOKEN,
            source_blocks=sources,
            destination_blocks=into,
            freed_blocks=freed,
            reason=reason,
            planner=self.config.planner,
            plan_us=84,
            copy_us=210,
        )
        self.event(
            "relocation",
            f"moved {moved} tok of {request.id}, freed {freed} blocks, 210 µs ({reason})",
            **msgspec.to_builtins(data),
        )
        return moved, freed

    def f(self) -> float:
        used = int((self.pool.flags & 1).sum())
        return 1 - int(self.pool.live.sum()) / (used * self.pool.block_size) if used else 0.0
