"""The demo's server: `vtoken serve` as a process group of its own, started, awaited, ended.

Knows the command line of `vtoken serve` and the health route; knows nothing of the traffic. A
benchmark starts vLLM's own server with it.

1. Everything that was started is gone when the `with` block is left, whatever ends it.
2. A server that dies, or is not ready in time, is a DemoError with the tail of its log.
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
from types import TracebackType
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
    """The demo cannot go on; the message says why and what to do."""


def pick_port(port: int | None) -> int:
    """`port` if it is free, a free one for None, preferring 8000. Raises DemoError when taken."""
    if port is None:
        return 8000 if _is_free(8000) else any_free_port()
    if not _is_free(port):
        raise DemoError(f"port {port} on {HOST} is taken; name another with --port")
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
    """A free port of the loopback that no server prefers, so that two at once do not meet."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class ProcessGroup:
    """A child in a session of its own, so that a Ctrl-C reaches only us and we end it in order."""

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

    def wait(self, seconds: float) -> str | None:
        """Wait for the first process to end; None when it succeeded, else what went wrong."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "out of time"
        return f"status {status}" if status else None

    def stop(self, signum: int = signal.SIGTERM, wait_s: float = TERMINATE_S) -> int:
        """Ask the first process to end, then kill what is left of the group; its exit status."""
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
        """`headers`: for the one call to vToken's routes that says whether it is ready.

        `stock`: vLLM's own server instead, without vToken and its routes.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._group is not None:
            self._group.stop()

    @property
    def pid(self) -> int:
        """Of the first process, and of the session that all of them share."""
        assert self._group is not None
        return self._group.process.pid

    def first_error(self) -> str | None:
        """The log's first line that names an exception: vLLM's last ones only repeat it."""
        if not self.log.is_file():
            return None
        with self.log.open(errors="replace") as lines:
            for line in lines:
                if ERROR_LINE.search(line) and not NOTICE_LINE.search(line):
                    return line.rstrip()
        return None

    def check_alive(self) -> None:
        """Raises DemoError with the log's tail when the server has ended."""
        assert self._group is not None
        status = self._group.process.poll()
        if status is not None:
            raise self._failure(f"the server ended with status {status}")

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
                        f"not ready after {self._startup_timeout_s:.0f} s "
                        "(--startup-timeout SECONDS waits longer, for a download say)"
                    )
                progress.tick()
                time.sleep(POLL_S)
            progress.done(f"the server is ready at {self.url}")
            if not self._stock and not _answers(client, "/vtoken/v1/status"):
                raise self._failure("the server runs, but does not answer /vtoken/v1/status")

    def _failure(self, what: str) -> DemoError:
        assert self._group is not None
        tail = self._group.log_tail() or "(empty)"
        return DemoError(f"{what}; the end of {self.log}:\n\n{tail}")


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False
