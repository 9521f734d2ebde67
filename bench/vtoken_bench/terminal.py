"""Run a program in its own pty, and record its output, with times, and its cost.

A thread reads the pty and timestamps every chunk, on request no faster than a slow link would. It
answers the query for synchronized updates as a terminal does, so that frames can be counted.
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

import psutil

from vtoken_bench.counters import cpu_s

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[a-zA-Z]|\][^\x07]*\x07|[PX^_].*?\x1b\\|.)", re.DOTALL)
REACTION_S = 5.0  # longest wait for any output
SYNC_QUERY, SYNC_REPLY = b"\x1b[?2026$p", b"\x1b[?2026;2$y"
FRAME_BEGIN = b"\x1b[?2026h"
LINK_S = 0.02  # what a slow link carries in this time is read at once


class Terminal:
    """`argv` at width x height; `started` is the monotonic time just before exec [s].

    `link_bytes_per_s`: the speed of a slow link to the terminal; None: as fast as it can.
    """

    def __init__(
        self,
        argv: Sequence[str],
        width: int,
        height: int,
        env: dict[str, str] | None = None,
        link_bytes_per_s: float | None = None,
    ) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._chunks: list[tuple[float, bytes]] = []
        self._changed = threading.Condition()
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
        speed = self._link_bytes_per_s
        most = 1 << 16 if speed is None else max(1, int(speed * LINK_S))
        arrival = time.monotonic()
        tail = b""
        with contextlib.suppress(OSError):
            while data := os.read(self._master, most):
                if speed is not None:
                    arrival = max(arrival, time.monotonic()) + len(data) / speed
                    time.sleep(max(0.0, arrival - time.monotonic()))
                with self._changed:
                    self._chunks.append((time.monotonic(), data))
                    self._changed.notify_all()
                if SYNC_QUERY in tail + data:
                    os.write(self._master, SYNC_REPLY)
                tail = data[1 - len(SYNC_QUERY) :]

    # ------------------------------------------------------------ output

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return sum(len(data) for _, data in self._chunks)

    @property
    def num_frames(self) -> int:
        """Synchronized updates so far."""
        with self._changed:
            return b"".join(data for _, data in self._chunks).count(FRAME_BEGIN)

    def mark(self) -> int:
        """The current position in the output, for `wait_for`."""
        with self._changed:
            return len(self._chunks)

    def text(self, since: int = 0, until: int | None = None) -> str:
        """Output between two marks, without escape sequences."""
        with self._changed:
            raw = b"".join(data for _, data in self._chunks[since:until])
        return _ESCAPES.sub("", raw.decode("utf-8", "replace"))

    def wait_for(self, wanted: str, since: int = 0, limit_s: float = 30.0) -> float:
        """Wait for `wanted`; return the monotonic time of its chunk. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(1)  # read the rest of the output
            with self._changed:
                count = len(self._chunks)
            if wanted in self.text(since, count):
                with self._changed:
                    return self._chunks[count - 1][0]
            with self._changed:
                if len(self._chunks) == count:
                    self._changed.wait(0.2)
            if ended or time.monotonic() > deadline:
                tail = self.text(since)[-300:]
                raise TimeoutError(f"{wanted!r} was not written in {limit_s:g} s; last: {tail!r}")

    def wait_for_any(self, since: int) -> float:
        """Wait for the first chunk after a mark; return its monotonic time."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._chunks) > since, REACTION_S):
                raise TimeoutError(f"nothing was written in {REACTION_S:g} s")
            return self._chunks[since][0]

    def type(self, keys: bytes) -> float:
        """Send `keys`; return the monotonic time just before [s]."""
        now = time.monotonic()
        os.write(self._master, keys)
        return now

    # ------------------------------------------------------------ cost

    def cpu_s(self) -> float:
        """CPU time so far, user and system [s]."""
        return cpu_s(self.process.pid)

    def rss_bytes(self) -> int:
        """Resident memory now."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

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
