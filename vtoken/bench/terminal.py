"""A program in a terminal of its own: what it writes, when, and what it costs.

Knows no console. A real pty, read by a thread that stamps every chunk; Linux only for the figures
from /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[a-zA-Z]|\][^\x07]*\x07|[PX^_].*?\x1b\\|.)", re.DOTALL)
_TICKS = os.sysconf("SC_CLK_TCK")


class Terminal:
    """`argv` at width x height; `started` is the monotonic time just before exec [s]."""

    def __init__(
        self, argv: Sequence[str], width: int, height: int, env: dict[str, str] | None = None
    ) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._chunks: list[tuple[float, bytes]] = []
        self._news = threading.Condition()
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **(env or {})},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 1 << 16):
                with self._news:
                    self._chunks.append((time.monotonic(), data))
                    self._news.notify_all()

    # ------------------------------------------------------------ what it wrote

    @property
    def num_bytes(self) -> int:
        with self._news:
            return sum(len(data) for _, data in self._chunks)

    def mark(self) -> int:
        """A place in the output, for `wait_for`."""
        with self._news:
            return len(self._chunks)

    def text(self, since: int = 0, until: int | None = None) -> str:
        """What it wrote between two marks, without escape sequences."""
        with self._news:
            raw = b"".join(data for _, data in self._chunks[since:until])
        return _ESCAPES.sub("", raw.decode("utf-8", "replace"))

    def wait_for(self, wanted: str, since: int = 0, limit_s: float = 30.0) -> float:
        """The monotonic time at which `wanted` had been written; raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(1)  # all that it wrote has been read
            with self._news:
                count = len(self._chunks)
            if wanted in self.text(since, count):
                with self._news:
                    return self._chunks[count - 1][0]
            with self._news:
                if len(self._chunks) == count:
                    self._news.wait(0.2)
            if ended or time.monotonic() > deadline:
                tail = self.text(since)[-300:]
                raise TimeoutError(f"{wanted!r} was not written in {limit_s:g} s; last: {tail!r}")

    def wait_for_any(self, since: int, limit_s: float = 5.0) -> float:
        """The monotonic time of the first chunk after a mark."""
        with self._news:
            if not self._news.wait_for(lambda: len(self._chunks) > since, limit_s):
                raise TimeoutError(f"nothing was written in {limit_s:g} s")
            return self._chunks[since][0]

    def type(self, keys: bytes) -> float:
        """Sends `keys`; the monotonic time just before [s]."""
        now = time.monotonic()
        os.write(self._master, keys)
        return now

    # ------------------------------------------------------------ what it cost

    def cpu_s(self) -> float:
        """CPU time so far, user and system [s]."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def rss_bytes(self) -> int:
        """Memory in RAM now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) * 1024 if found else 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)
        self._reader.join(5)
