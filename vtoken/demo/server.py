"""Starts `vtoken serve` in its own process group, waits until it is ready, and stops it.

Benchmarks also start vLLM's own server with it.

1. When the `with` block exits, for any reason, all of its processes are stopped.
2. A server that exits, or is not ready in time, raises DemoError with the tail of its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx

from vtoken.demo.progress import Progress

HOST = "127.0.0.1"
POLL_S = 0.25
TERMINATE_S = 15.0  # from SIGTERM to SIGKILL
LOG_TAIL_LINES = 25
ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
NOTICE_LINE = re.compile(r"\b(WARNING|INFO|DEBUG)\b")
VTOKEN = [sys.executable, "-m", "vtoken.cli"]
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")


class DemoError(RuntimeError):
    """The demo cannot continue; the message has the reason and the fix."""


def pick_port(port: int | None) -> int:
    """`port`, or for None a free one, preferably 8000. Raises DemoError if `port` is taken."""
    if port is None:
        return 8000 if _is_free(8000) else any_free_port()
    if not _is_free(port):
        raise DemoError(f"port {port} on {HOST} is taken; choose another with --port")
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def any_free_port() -> int:
    """An ephemeral loopback port, so that two servers started at once do not collide."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class ProcessGroup:
    """A child in its own session, so that Ctrl-C does not reach it and we stop it in order."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def log_tail(self) -> str:
        with self.log.open(errors="replace") as lines:
            return "".join(deque(lines, LOG_TAIL_LINES)).rstrip()

    def stop(self, signum: int = signal.SIGTERM, wait_s: float = TERMINATE_S) -> int:
        """Signal the first process, then kill the rest of the group; returns its exit status."""
        try:
            self.process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
        finally:  # also when a second Ctrl-C ends the wait
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Server:
    """`vtoken serve MODEL` on loopback, ready inside the `with` block."""

    def __init__(
        self,
        model: str,
        *,
        port: int,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        startup_timeout_s: float,
        headers: Mapping[str, str] | None = None,
        stock: bool = False,
    ) -> None:
        """`headers`: of the readiness check on vToken's routes.

        `stock`: start vLLM's own server, without vToken and its routes.
        """
        self.url = f"http://{HOST}:{port}"
        self.log = log
        program = VLLM if stock else (*VTOKEN, "serve")
        self._command = [*program, model, "--host", HOST, "--port", str(port), *arguments]
        self._environment = environment
        self._startup_timeout_s = startup_timeout_s
        self._headers = headers
        self._stock = stock
        self._group: ProcessGroup | None = None

    def __enter__(self) -> Self:
        self._group = ProcessGroup(self._command, self.log, self._environment)
        try:
            self._wait_until_ready()
        except BaseException:
            self._group.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.stop()

    @property
    def pid(self) -> int:
        """The id of the first process, and of the session of all of them."""
        assert self._group is not None
        return self._group.process.pid

    def first_error(self) -> str | None:
        """The log's first line with an exception; vLLM's later ones only repeat it."""
        if not self.log.is_file():
            return None
        with self.log.open(errors="replace") as lines:
            for line in lines:
                if ERROR_LINE.search(line) and not NOTICE_LINE.search(line):
                    return line.rstrip()
        return None

    def check_alive(self) -> None:
        """Raises DemoError with the log's tail if the server has exited."""
        assert self._group is not None
        status = self._group.process.poll()
        if status is not None:
            raise self._failure(f"the server exited with status {status}")

    def _wait_until_ready(self) -> None:
        progress = Progress(f"starting the server, log in {self.log}")
        deadline = time.monotonic() + self._startup_timeout_s
        with httpx.Client(
            base_url=self.url, headers=self._headers, timeout=5.0, trust_env=False
        ) as client:
            while not _answers(client, "/health"):
                self.check_alive()
                if time.monotonic() > deadline:
                    raise self._failure(
                        f"the server is not ready after {self._startup_timeout_s:.0f} s (to wait "
                        "longer, for instance for a download: --startup-timeout SECONDS)"
                    )
                progress.tick()
                time.sleep(POLL_S)
            progress.done(f"the server is ready at {self.url}")
            if not self._stock and not _answers(client, "/vtoken/v1/engines"):
                raise self._failure("the server is up but does not answer /vtoken/v1/engines")

    def _failure(self, what: str) -> DemoError:
        assert self._group is not None
        tail = self._group.log_tail() or "(empty)"
        return DemoError(f"{what}; last lines of {self.log}:\n\n{tail}")


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False
