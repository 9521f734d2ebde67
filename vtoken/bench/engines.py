"""Engines for benchmarks: each one in a process of its own, asked over a pipe.

Knows neither vLLM nor what is measured: the other end is `vtoken.vllm.bench_worker`.
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
from typing import Any


class EngineError(RuntimeError):
    """An engine died, or broke an invariant; the message has its last words."""


class Engine:
    """A worker process with one engine in it; `config` None is stock vLLM without the plugin.

    `threads` of a forward; None leaves it to vLLM. `settings`: for `vtoken.vllm.engine_args`.
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
        self.name = name
        read, write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vtoken.vllm.bench_worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=(write,),
            env=os.environ | ({} if threads is None else _threads(threads)),
            text=True,
        )
        os.close(write)
        self._answers = os.fdopen(read)
        self.facts = self.ask({"vtoken": config, "engine": engine_args, "settings": settings or {}})

    def subscribe(self) -> None:
        """Take a console's share of the engine's work: subscribe to everything and read it."""
        threading.Thread(target=_drain, args=(self.facts["endpoint"],), daemon=True).start()
        time.sleep(0.3)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer of the worker; EngineError when it died."""
        assert self._process.stdin is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            pass
        if not line:
            self._process.wait(15)
            self._log.seek(0)
            words = self._log.read().decode(errors="replace")[-2000:]
            raise EngineError(f"the engine of {self.name!r} died:\n{words}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("violations"):
            raise EngineError(f"{self.name}: an invariant broke")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(15)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()


def _threads(count: int) -> dict[str, str]:
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
