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

from vtoken_api.statedir import FILE_MODE

MAX_BYTES = 4 * 1024 * 1024
MAX_HEAD_BYTES = 64
MOST_READ_BYTES = 2 * MAX_BYTES


class _Head(msgspec.Struct):
    """The first line of a file."""

    lines_before: int


class Journal:
    """At most two files of about `max_bytes` each."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._older = path.with_name(path.name + ".1")
        self._max_bytes = max_bytes

    def append(self, line: bytes) -> None:
        """Add a line without its end; raises OSError, and then nothing was added."""
        with self._locked() as file:
            size = os.fstat(file).st_size
            if size > MAX_HEAD_BYTES and size + len(line) > self._max_bytes:
                lines_before = _count(_read(self.path))
                os.rename(self.path, self._older)
            else:
                data = line + b"\n"
                if not size:
                    data = msgspec.json.encode(_Head(0)) + b"\n" + data
                elif os.pread(file, 1, size - 1) != b"\n":
                    data = b"\n" + data
                _write(file, size, data)
                return
        with self._locked() as file:  # the new file, unless another process was first
            if os.fstat(file).st_size == 0:
                _write(file, 0, msgspec.json.encode(_Head(lines_before)) + b"\n")
        self.append(line)

    def read(self, limit: int) -> tuple[list[bytes], int]:
        """The newest `limit` lines, oldest first, and how many lines are no longer held."""
        newer, older = _read(self.path), _read(self._older)
        lines = [*_lines(older), *_lines(newer)]
        return lines[-limit:], _head(older or newer)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file's descriptor, ours alone until the end, and certainly that of `path`."""
        while True:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            file = os.open(self.path, flags, FILE_MODE)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(file), os.stat(self.path)):
                    yield file
                    return
            except FileNotFoundError:
                pass
            finally:
                os.close(file)


def _write(file: int, size: int, data: bytes) -> None:
    """Append all of `data` to a file of `size` bytes, or nothing."""
    written = os.write(file, data)
    if written < len(data):
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_READ_BYTES)  # whatever `path` is, a device without an end too
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
