"""A journal: JSON lines on disk, appended by several processes, bounded, in two files.

Knows files and bytes, not what a line means. `NAME` is written; when it is full it becomes
`NAME.1`, over the older one. Blocks on the disk: call it from a thread.

1. A line is whole or absent: writers take turns (flock), a write that was cut short is taken back,
   and a line torn by a crash is ended before the next one begins.
2. Each file opens with how many lines came before it, so that what is no longer held is counted.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vtoken_api.state.statedir import FILE_MODE

MAX_BYTES = 4 * 1024 * 1024
MAX_HEAD_BYTES = 64
MOST_READ_BYTES = 2 * MAX_BYTES  # of one file, whatever it is: a device without an end too


class _Head(msgspec.Struct):
    """The first line of a file."""

    lines_before: int


class Journal:
    """At most two files of about `max_bytes` each."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._older = path.with_name(path.name + ".1")
        self._max_bytes = max_bytes

    def check(self) -> None:
        """Raises OSError when the next line could not be added, as far as can be told before."""
        with self._locked():
            space = os.statvfs(self.path)
            free = space.f_bfree if os.geteuid() == 0 else space.f_bavail
            if space.f_blocks and not free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stamp(self) -> tuple[int, int]:
        """Differs once a line was added; raises OSError."""
        seen = self.path.stat()
        return seen.st_ino, seen.st_size

    def append(self, line: bytes) -> None:
        """Add a line without its end; raises OSError, and then nothing was added."""
        while True:
            with self._locked() as file:
                size = os.fstat(file).st_size
                if size <= MAX_HEAD_BYTES or size + len(line) <= self._max_bytes:
                    _write(file, size, self._seam(file, size) + line + b"\n")
                    return
                os.rename(self.path, self._older)

    def read(self, limit: int) -> tuple[list[bytes], int]:
        """The newest `limit` lines, oldest first, and how many lines are no longer held."""
        while True:
            newer, older, moved = self._both()
            if not moved:
                lines = [*_lines(older), *_lines(newer)]
                return lines[-limit:], _head(older or newer)

    def _seam(self, file: int, size: int) -> bytes:
        """What stands before the next line: the head of an empty file, or the end of a torn line.

        Whoever finds the file empty takes its head from the older one, which nobody writes to any
        more: it is the same for every process, and after a crash between rename and head.
        """
        if not size:
            return msgspec.json.encode(_Head(_count(_read(self._older)))) + b"\n"
        return b"" if os.pread(file, 1, size - 1) == b"\n" else b"\n"

    def _both(self) -> tuple[bytes, bytes, bool]:
        """Both files' contents, and whether the newer was renamed meanwhile."""
        try:
            with self.path.open("rb") as file:  # open until compared, so its inode stays its own
                newer, older = file.read(MOST_READ_BYTES), _read(self._older)
                return newer, older, not _is_at(file.fileno(), self.path)
        except FileNotFoundError:
            return b"", _read(self._older), self.path.exists()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file's descriptor, ours alone until the end, and certainly that of `path`."""
        while True:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            file = os.open(self.path, flags, FILE_MODE)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _is_at(file, self.path):
                    yield file
                    return
            finally:
                os.close(file)


def _write(file: int, size: int, data: bytes) -> None:
    """Append all of `data` to a file of `size` bytes, or nothing."""
    written = os.write(file, data)
    if written < len(data):
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_READ_BYTES)
    except FileNotFoundError:
        return b""


def _head(data: bytes) -> int:
    try:
        return msgspec.json.decode(data.partition(b"\n")[0], type=_Head).lines_before
    except msgspec.DecodeError:
        return 0


def _lines(data: bytes) -> list[bytes]:
    lines = data.splitlines()
    return lines[1:] if lines and lines[0].startswith(b'{"lines_before"') else lines


def _count(data: bytes) -> int:
    """Lines up to the end of a file with these contents, from the journal's very first."""
    return _head(data) + len(_lines(data))
