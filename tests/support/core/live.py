"""The core engine with control plane and telemetry, for tests of API, clients and console.

`steps(n)` runs steps, `stepping()` runs them in the background. The engine uses one thread, like
vLLM's engine core.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, Self

import msgspec
import numpy as np

import vtoken
from tests.support.core.engine import CoreEngine, Request
from tests.support.shipped import with_its_budget
from vtoken.base.arrays import Bools, Ints
from vtoken.base.errors import RefusedError
from vtoken.control.controller import Controller
from vtoken.control.facts import EngineFacts
from vtoken.control.report import Reporter
from vtoken.control.telemetry import Publisher
from vtoken.control.waiting import QueuedRequest
from vtoken.core.config.request_rules import RequestRules
from vtoken.core.config.values import merge_patch
from vtoken.policies import make_policy
from vtoken.wire import Problem, Reply
from vtoken.wire.commands import Command, read_command

# A configuration that leaves holes in requests, and no round fills them.
HOLES: dict[str, Any] = {
    "policy": {"name": "random"},
    "budget_tokens": 64,
    "evict_when": "always",
    "interval_tokens": 16,
    "recycle": False,
    "reclamation": "paused",
}
SESSION = RequestRules(policy=make_policy("none", {}), session=True)


class CoreQueue:
    """The core's waiting requests, for the reporter."""

    def __init__(self, core: CoreEngine) -> None:
        self._core = core

    def first(self, limit: int) -> list[QueuedRequest]:
        return [_queued(request) for request in islice(self._core.waiting, limit)]

    def find(self, request_id: str) -> QueuedRequest | None:
        found = (_queued(r) for r in self._core.waiting if r.id == request_id)
        return next(found, None)


def _queued(request: Request) -> QueuedRequest:
    return QueuedRequest(
        request.id,
        request.num_prompt_tokens,
        request.num_known - request.num_prompt_tokens,
        "preempted" if request.admissions > 0 else "waiting",
    )


class Words:
    """A `Vocabulary` of 97 words in a cycle: one special, every tenth punctuation."""

    def refusal(self) -> str | None:
        return None

    def words(self, request_id: str, ids: Ints) -> Ints:
        del request_id
        return ids % 97

    def known_words(self, request_id: str, start: int, stop: int) -> Ints:
        return self.words(request_id, np.arange(start, stop))

    def special(self, words: Ints) -> Bools:
        return words == 0

    def punctuation(self, words: Ints) -> Bools:
        return words % 10 == 9


def controller_of(core: CoreEngine) -> Controller:
    """The control plane of an engine without telemetry."""
    facts = EngineFacts("e", "0", "0", "m", "cpu")
    return Controller(Reporter(core.runtime, facts, core.store.hashed))


class LiveEngine:
    """`handle(command)` runs a command between two steps. Requests come from tests or traffic.

    Traffic: `concurrency` requests at any time, each of `prompt_tokens` + `max_tokens`, the first
    `prefix_tokens` shared.
    """

    def __init__(
        self,
        core: CoreEngine,
        *,
        concurrency: int,
        prompt_tokens: int,
        max_tokens: int,
        prefix_tokens: int,
        max_hz: float,
        epoch: str,
        model: str,
    ) -> None:
        self.core = core
        self.runtime, self.store = core.runtime, core.store
        self.concurrency = concurrency
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.prefix_tokens = prefix_tokens
        self.facts = EngineFacts(
            epoch=epoch,
            vtoken_version=vtoken.__version__,
            vllm_version="0.32.0",
            model=model,
            device="cpu",
            block_bytes=core.runtime.geometry.bytes_per_token * core.block_size,
        )
        self.reporter = Reporter(core.runtime, self.facts, core.store.hashed, CoreQueue(core))
        self.publisher = Publisher(core.runtime.events, max_hz=max_hz, max_share=float("inf"))
        self.controller = Controller(
            self.reporter, self.publisher.endpoint, end_request=self.core.remove
        )
        self._num_requests = 0

    # ------------------------------------------------------------ commands

    def handle(self, command: Command) -> Reply:
        """Run one command and publish the resulting state."""
        reply = self.controller.handle(command)
        self.publish()
        return reply

    def ask(self, op: str, *, actor: str = "local", **args: Any) -> Reply:
        """Run a command with the checks of the bus. With `validate_only`, a change of the
        configuration is previewed, as over HTTP.
        """
        if args.pop("validate_only", False):
            op, args = "preview", {"change": {"op": op, **args}}
        payload = msgspec.msgpack.encode({"call": {"op": op, **args}, "actor": actor})
        try:
            return self.handle(read_command(payload))
        except RefusedError as error:
            return Reply(problem=Problem.of(error))

    def call(self, op: str, *, actor: str = "local", **args: Any) -> Any:
        """The value of a command; fails if it is refused."""
        reply = self.ask(op, actor=actor, **args)
        assert reply.problem is None, reply.problem
        return reply.value

    def configure(self, **patch: Any) -> None:
        """Replace the configuration without a new revision."""
        geometry = self.runtime.geometry
        self.runtime.active.config = merge_patch(
            self.runtime.config,
            with_its_budget(patch),
            num_blocks=geometry.num_blocks,
            num_layers=geometry.num_layers,
        )

    # ------------------------------------------------------------ requests

    def admit(self, request_id: str, prompt_tokens: int, **options: Any) -> None:
        """Add a request whose prompt is computed in the next step, see `CoreEngine.add`."""
        self.core.add(request_id, prompt_tokens, **options)
        self._count_requests()

    def finish(self, request_id: str) -> None:
        self.core.remove(request_id)
        self._count_requests()

    # ------------------------------------------------------------ steps

    def steps(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._step()

    @contextlib.asynccontextmanager
    async def stepping(self, pause_s: float = 0.02) -> AsyncIterator[None]:
        """Run a step every `pause_s` seconds in the background."""

        async def go() -> None:
            while True:
                self._step()
                await asyncio.sleep(pause_s)

        task = asyncio.create_task(go())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _step(self) -> None:
        core = self.core
        while len(core.running) + len(core.waiting) < self.concurrency:
            core.add(
                f"req-{self._num_requests}",
                self.prompt_tokens,
                max_tokens=self.max_tokens,
                prefix="system" if self.prefix_tokens else None,
                prefix_tokens=self.prefix_tokens,
                seed=self._num_requests,
            )
            self._num_requests += 1
        if core.running or core.waiting:
            self.controller.before_step()
            core.step()
        self._count_requests()
        self.publisher.publish(self.controller.frame)

    # ------------------------------------------------------------ telemetry

    def publish(self) -> None:
        """Publish telemetry now, regardless of the rate."""
        self.publisher.publish(self.controller.frame, force=True)

    def close(self) -> None:
        self.publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count_requests(self) -> None:
        self.facts.running, self.facts.waiting = len(self.core.running), len(self.core.waiting)


def make_engine(
    *,
    num_blocks: int = 84,
    block_size: int = 16,
    config: dict[str, Any] | None = None,
    concurrency: int = 4,
    prompt_tokens: int = 320,
    max_tokens: int = 160,
    prefix_tokens: int = 32,
    max_hz: float = 20.0,
    epoch: str = "test-epoch",
    model: str = "simulated",
    **options: Any,
) -> LiveEngine:
    """An idle engine; `options` are those of `CoreEngine`.

    `config` is a merge patch over the shipped configuration. Its traffic outgrows the pool, so
    that requests give all the time.
    """
    core = CoreEngine(
        num_blocks=num_blocks,
        block_size=block_size,
        config=config,
        **{"check_every_step": False, **options},
    )
    return LiveEngine(
        core,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        prefix_tokens=prefix_tokens,
        max_hz=max_hz,
        epoch=epoch,
        model=model,
    )


def make_quiet(
    num_blocks: int = 64,
    *,
    block_size: int = 16,
    epoch: str = "e1",
    model: str = "core",
    **options: Any,
) -> LiveEngine:
    """An idle engine without traffic; tests admit requests, and every step is checked.

    Without `prefix_caching` no block is hashed, so every block may be written and belongs to one
    request, and tests can state exact numbers.
    """
    live = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        config={"verify_ratio": 0.0},
        concurrency=0,
        max_hz=1000.0,
        epoch=epoch,
        model=model,
        **{"num_layers": 2, "prefix_caching": False, "check_every_step": True, **options},
    )
    live.runtime.ranking.vocabulary = Words()
    return live


def make_holes(concurrency: int, *, prefix_caching: bool = True, **config: Any) -> LiveEngine:
    """An idle engine with blocks of 4 slots, holes in all requests, and nothing reclaimed."""
    live = make_engine(
        block_size=4,
        num_blocks=96,
        concurrency=concurrency,
        prompt_tokens=40,
        prefix_tokens=0,
        max_tokens=400,
        config={
            "policy": {"name": "random", "params": {"recent": 1, "sinks": 0}},
            "budget_tokens": 16,
            "evict_when": "always",
            "interval_tokens": 4,
            "reclamation": "paused",
            "recycle": False,
            "headroom_blocks": 8,
        }
        | config,
        prefix_caching=prefix_caching,
    )
    live.steps(5)
    return live


def make_pressed(num_requests: int = 12, num_blocks: int = 65, **config: Any) -> LiveEngine:
    """Requests of which a few fill the pool, under pressure; no step has run."""
    live = make_quiet(num_blocks, block_size=4)
    live.core.reserves = True
    fixed = {"policy": {"name": "streaming_llm"}, "budget_tokens": 24, "interval_tokens": 8}
    live.configure(**fixed | config)
    for i in range(num_requests):
        live.admit(f"r{i}", 20 + i, max_tokens=60)
    return live
