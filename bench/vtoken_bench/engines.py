"""Engines for benchmarks, each in its own process and driven over a pipe.

The other end is a module of `vtoken_bench.vllm`, mostly `worker`. This module does not import vLLM.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

TURN_S = 1.0  # some steps: shorter than what slows a machine down, longer than caches take to fill


class EngineError(RuntimeError):
    """An engine died or violated an invariant; the message ends with its last output."""


class Process:
    """A process of the benchmark, asked in lines of JSON; `name` is for messages.

    `module`: what it runs, with the file descriptor of its answers as argument.
    """

    def __init__(self, name: str, module: str, environment: Mapping[str, str]) -> None:
        self.name = name
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process runs)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=(write,),
            env=os.environ | environment,
            text=True,
        )
        os.close(write)
        self._replies = os.fdopen(read)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker and return its reply. Raises EngineError."""
        assert self._process.stdin is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            pass
        if not line:
            self._process.wait(15)
            self._log.seek(0)
            output = self._log.read().decode(errors="replace")[-2000:]
            raise EngineError(f"the engine of {self.name!r} died:\n{output}")
        reply: dict[str, Any] = json.loads(line)
        if reply.get("violations"):
            raise EngineError(f"the engine of {self.name!r} violated an invariant")
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(15)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._log.close()


class Engine(Process):
    """A worker process with one engine. `config` None: stock vLLM without the plugin.

    `threads` per forward; None: vLLM's choice. `settings`: for `vtoken.vllm.engine_args`.
    """

    def __init__(
        self,
        name: str,
        config: dict[str, Any] | None,
        engine_args: dict[str, Any],
        *,
        threads: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name, "vtoken_bench.vllm.worker", thread_environment(threads))
        self.facts = self.ask({"vtoken": config, "engine": engine_args, "settings": settings or {}})

    def subscribe(self) -> None:
        """Add the load of one console: subscribe to all telemetry and discard it."""
        threading.Thread(target=_drain, args=(self.facts["endpoint"],), daemon=True).start()
        time.sleep(0.3)


def ask_in_turns(asked: Sequence[tuple[Engine, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The replies to one load for each engine, which run in turns of TURN_S, one at a time.

    So whatever slows the machine down slows all of them down alike. Raises EngineError.
    """
    replies = [engine.ask(request | {"turn_s": TURN_S}) for engine, request in asked]
    while any(reply.get("paused") for reply in replies):
        for number, (engine, _) in enumerate(asked):
            if replies[number].get("paused"):
                replies[number] = engine.ask({"turn": "yours"})
    return replies


def thread_environment(count: int | None) -> dict[str, str]:
    """For processes with engines: `count` threads a forward, on whatever cores are free.

    None: vLLM's choice.
    """
    if count is None:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(count)}


def _drain(endpoint: str) -> None:
    import zmq

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    while True:
        socket.recv_multipart()


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(32, 127) for _ in range(num_tokens)]
