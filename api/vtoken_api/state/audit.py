"""The audit log: changes and dry runs with their callers, on disk and across restarts.

It has accepted calls and changes that the engine reverted. A refused call leaves no entry.
`GET /events` lists what the engine did; the audit log lists who requested it.

1. An entry is a JSON line in AUDIT_FILE. When the file is full it replaces the one before it.
2. A line is complete or absent: a short write is taken back, and a line that a crash truncated is
   ended before the next one begins.
3. While entries cannot be written, the newest MAX_UNWRITTEN stay in memory, and `error` and the log
   say so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken_api.log import logger
from vtoken_api.state.statedir import FILE_MODE, StateDir

AUDIT_FILE = "audit.jsonl"
MAX_BYTES = 4 * 1024 * 1024  # of a file
MOST_READ_BYTES = 2 * MAX_BYTES  # of a file, which might be an endless device
MAX_UNWRITTEN = 1000

_entries: Decoder[wire.AuditEntry] = Decoder(wire.AuditEntry)


class AuditLog:
    """Entries in two files of at most about `max_bytes` in `state_dir`. All methods block on the
    disk: call them from one thread."""

    def __init__(self, state_dir: StateDir, *, max_bytes: int = MAX_BYTES) -> None:
        self.error = ""  # why entries are in memory only
        self.error_ts = 0.0  # when `error` began
        self._state_dir = state_dir
        self._path = state_dir.path / AUDIT_FILE
        self._older = self._path.with_name(AUDIT_FILE + ".1")
        self._max_bytes = max_bytes
        self._unwritten: deque[wire.AuditEntry] = deque()
        self._lost = 0  # unwritten entries that newer ones displaced

    def append(self, entry: wire.AuditEntry) -> None:
        """Write `entry`, or keep it in memory."""
        self._unwritten.append(entry)
        self.write()
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._unwritten.popleft()
            self._lost += 1

    def write(self) -> None:
        """Write the entries in memory, in order; without any, check whether one could be."""
        try:
            self._state_dir.acquire()
            if not self._unwritten:
                self._check_space()
            while self._unwritten:
                self._append(msgspec.json.encode(self._unwritten[0]))
                self._unwritten.popleft()
        except OSError as error:
            if not self.error:
                self.error_ts = time.time()
                logger.error(
                    "vtoken: cannot write the audit log; keeping entries in memory: %s", error
                )
            self.error = str(error)
            return
        if self.error:
            logger.warning("vtoken: the audit log is written again; %d entries lost", self._lost)
            self.error = ""

    def page(self, limit: int) -> wire.AuditPage:
        """The newest `limit` entries, oldest first; unwritten ones are last."""
        written: list[wire.AuditEntry] = []
        error = self.error
        try:
            self._state_dir.acquire()
            written = [*_read(self._older), *_read(self._path)]
        except OSError as fault:
            error = str(fault)
        entries = [*written, *self._unwritten][-limit:]
        return wire.AuditPage(entries=entries, dropped=self._lost, storage_error=error)

    def _append(self, line: bytes) -> None:
        """Append `line` or nothing; raises OSError."""
        with self._opened() as file:
            size = os.fstat(file).st_size
            if not size or size + len(line) < self._max_bytes:
                cut_off = size and os.pread(file, 1, size - 1) != b"\n"
                data = (b"\n" if cut_off else b"") + line + b"\n"
                if os.write(file, data) < len(data):
                    os.ftruncate(file, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
        os.rename(self._path, self._older)
        self._append(line)

    def _check_space(self) -> None:
        """Raises OSError if the disk is full or the file cannot be opened for writing."""
        with self._opened() as file:
            space = os.statvfs(file)
            free = space.f_bfree if os.geteuid() == 0 else space.f_bavail
            if space.f_blocks and not free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The descriptor of the newer file, for reading and appending."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, FILE_MODE)
        try:
            yield file
        finally:
            os.close(file)


def _read(path: Path) -> list[wire.AuditEntry]:
    """The entries of a file, without lines that are none; raises OSError."""
    entries = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file.read(MOST_READ_BYTES).splitlines():
            with contextlib.suppress(MalformedError):
                entries.append(_entries.decode(line))
    return entries
