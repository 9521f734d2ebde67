"""JSON lines on disk, bounded by rotating two files.

Lines are appended to `NAME`; when it is full it replaces `NAME.1`. All calls block on the disk:
call them from one thread of one process.

1. A line is complete or absent: a short write is truncated, and a line that a crash truncated is
   terminated before the next one begins.
2. The first line of each file has the number of lines before it, so that dropped lines are counted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vtoken.base.documents import Decoder, MalformedError
from vtoken_api.state.statedir import FILE_MODE

MAX_BYTES = 4 * 1024 * 1024
MAX_HEAD_BYTES = 64
MOST_READ_BYTES = 2 * MAX_BYTES  # of one file, which might be an endless device


class _Head(msgspec.Struct):
    """The first line of a file."""

    lines_before: int


_heads: Decoder[_Head] = Decoder(_Head)


class RotatingFile:
    """At most two files of about `max_bytes` each."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._older = path.with_name(path.name + ".1")
        self._max_bytes = max_bytes

    def check(self) -> None:
        """Raises OSError if the disk is full or the file cannot be opened for writing."""
        with self._opened() as file:
            space = os.statvfs(file)
            free = space.f_bfree if os.geteuid() == 0 else space.f_bavail
            if space.f_blocks and not free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def append(self, line: bytes) -> None:
        """Append `line`, given without its newline; on OSError nothing is added."""
        with self._opened() as file:
            size = os.fstat(file).st_size
            if size <= MAX_HEAD_BYTES or size + len(line) <= self._max_bytes:
                _write(file, size, self._separator(file, size) + line + b"\n")
                return
        os.rename(self.path, self._older)
        self.append(line)

    def read(self, limit: int) -> tuple[list[bytes], int]:
        """The newest `limit` lines, oldest first, and how many lines are no longer held."""
        older, newer = _read(self._older), _read(self.path)
        lines = [*_lines(older), *_lines(newer)]
        return lines[-limit:], _head(older or newer)

    def _separator(self, file: int, size: int) -> bytes:
        """The bytes before the next line: the head of an empty file, or the end of a cut-off line.

        The head is computed from the older file, also after a crash between rename and head.
        """
        if not size:
            return msgspec.json.encode(_Head(_count(_read(self._older)))) + b"\n"
        return b"" if os.pread(file, 1, size - 1) == b"\n" else b"\n"

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The descriptor of the newer file, for reading and appending."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self.path, flags, FILE_MODE)
        try:
            yield file
        finally:
            os.close(file)


def _write(file: int, size: int, data: bytes) -> None:
    """Append all of `data` to a file of `size` bytes or nothing; raises OSError."""
    written = os.write(file, data)
    if written < len(data):
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_READ_BYTES)
    except FileNotFoundError:
        return b""


def _head(data: bytes) -> int:
    try:
        return _heads.decode(data.partition(b"\n")[0]).lines_before
    except MalformedError:
        return 0


def _lines(data: bytes) -> list[bytes]:
    lines = data.splitlines()
    return lines[1:] if lines and lines[0].startswith(b'{"lines_before"') else lines


def _count(data: bytes) -> int:
    """The number of lines from the very first to the end of a file with these contents."""
    return _head(data) + len(_lines(data))
