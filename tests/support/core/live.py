"""A core engine that runs by itself: traffic, steps in a thread, control plane and telemetry.

For tests of everything around the engine (API, stream, command line, console) without vLLM.
"""

from __future__ import annotations

import threading
from itertools import islice
from types import TracebackType
from typing import Any

from tests.support.core.engine import CoreEngine, Request
from vtoken.control.controller import Controller
from vtoken.control.report import EngineFacts, Reporter
from vtoken.control.waiting import QueuedRequest
from vtoken.stream.telemetry import Publisher
from vtoken.wire import Command, Reply


class CoreQueue:
    """The core's waiting requests, as the reporter asks for them."""

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
        preempted=request.admissions > 0,
    )


class LiveEngine:
    """`handle(command)` answers between two steps, from any thread, running or not.

    As a context manager it starts stepping on entry and closes on exit. Traffic: `concurrency`
    requests at any time, each of `prompt_tokens` + `max_tokens`, the first `prefix_tokens` shared.
    """

    def __init__(
        self,
        core: CoreEngine,
        *,
        concurrency: int,
        prompt_tokens: int,
        max_tokens: int,
        prefix_tokens: int,
        step_seconds: float,
        max_hz: float,
        epoch: str,
    ) -> None:
        self.core = core
        self.concurrency = concurrency
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.prefix_tokens = prefix_tokens
        self.step_seconds = step_seconds
        self.facts = EngineFacts(
            epoch=epoch,
            vtoken_version="0.0.0",
            vllm_version="0.0.0",
            model="simulated",
            device="cpu",
        )
        self.reporter = Reporter(core.runtime, self.facts, core.store.hashed, CoreQueue(core))
        self.publisher = Publisher(core.runtime.events, max_hz=max_hz, max_share=float("inf"))
        self.controller = Controller(self.reporter, self.publisher.endpoint)
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_requests = 0

    def handle(self, command: Command) -> Reply:
        """One command, between two steps."""
        with self._lock:
            return self.controller.handle(command)

    def call(self, op: str, *, actor: str = "local", **args: Any) -> Any:
        """The value of a command that must not be refused."""
        reply = self.handle(Command(op=op, args=args, actor=actor))
        assert reply.problem is None, reply.problem
        return reply.value

    def steps(self, num_steps: int = 1) -> None:
        """Steps in the caller's thread; the background thread need not run."""
        for _ in range(num_steps):
            with self._lock:
                self._step()

    def publish(self) -> None:
        """Telemetry now, whatever the rate."""
        with self._lock:
            self.publisher.publish(self.controller.frame, force=True)

    def start(self) -> LiveEngine:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="core-engine", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop stepping; commands are still answered. Raises what a step raised."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self.publisher.close()

    def __enter__(self) -> LiveEngine:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.step_seconds):
                self.steps()
        except BaseException as error:
            self.failure = error

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
        self.facts.running, self.facts.waiting = len(core.running), len(core.waiting)
        self.publisher.publish(self.controller.frame)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    config: dict[str, Any] | None = None,
    concurrency: int = 4,
    prompt_tokens: int = 96,
    max_tokens: int = 160,
    prefix_tokens: int = 32,
    step_seconds: float = 0.005,
    max_hz: float = 20.0,
    epoch: str = "test-epoch",
) -> LiveEngine:
    """A wired engine at rest: `with make_engine() as engine:` steps it, `engine.steps(n)` by hand.

    `config` is a merge patch over the defaults; without one, streaming_llm with a budget of 64
    evicts and reclaims all the time.
    """
    patch: dict[str, Any] = {
        "policy": {"name": "streaming_llm"},
        "budget_tokens": 64,
        "interval_tokens": 8,
    }
    core = CoreEngine(
        num_blocks=num_blocks,
        block_size=block_size,
        config=patch if config is None else config,
        check_every_step=False,
    )
    return LiveEngine(
        core,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        prefix_tokens=prefix_tokens,
        step_seconds=step_seconds,
        max_hz=max_hz,
        epoch=epoch,
    )


def make_holes(concurrency: int, **config: Any) -> LiveEngine:
    """An engine of blocks of 4 with holes everywhere and nothing reclaimed, at rest."""
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
            "interval_tokens": 4,
            "reclamation": "paused",
            "recycle": False,
            "headroom_blocks": 8,
        }
        | config,
    )
    live.steps(5)
    return live
