"""The lines of a file, plain or gzip, one at a time, with seeking to lines read before.

Gzip is detected by the file's first bytes, not by its name; it may have several members. `next`
returns None at the current end and may be called again, since the file may still be growing. After
damage in a gzip member, reading continues with the next member that begins behind it.
"""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vtoken.recording.errors import DamageError, RecordingError

CHUNK_BYTES = 16 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024
GZIP_MAGIC = b"\x1f\x8b"
MEMBER = re.compile(rb"\x1f\x8b\x08[\x00\x08]")  # the start of one, without or with a file's name
MEMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """The start of line `number`, counted from 1: `skip` bytes of text after byte `start`.

    `start` is 0 in a plain file, the offset of a gzip member in a compressed one.
    """

    start: int
    skip: int
    number: int


class _Text(NamedTuple):
    start: int
    skip: int
    data: bytes


class _DamagedMember(Exception):  # noqa: N818 - `Lines` converts it
    """The gzip member that begins at byte `start` cannot be decompressed completely."""

    def __init__(self, start: int, error: zlib.error) -> None:
        super().__init__(f"damaged after byte {start:,}: {error}")


class _Plain:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @property
    def inside(self) -> bool:
        return False

    def seek(self, start: int, skip: int) -> None:
        self._file.seek(start + skip)

    def read(self) -> _Text | None:
        at = self._file.tell()
        data = self._file.read(CHUNK_BYTES)
        return _Text(0, at, data) if data else None


class _Gzip:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rest: _Text | None = None  # the end of a chunk after a seek into its middle
        self._start: int
        self._skip: int
        self._input: bytes
        self._inflate: zlib._Decompress
        self._damage: _DamagedMember | None  # behind the text read so far
        self._begin(0, b"")

    @property
    def inside(self) -> bool:
        """Whether the text read so far ends inside a member."""
        return self._consumed and not self._inflate.eof

    def seek(self, start: int, skip: int) -> None:
        self._file.seek(start)
        self._begin(start, b"")
        self._rest = None
        while self._skip < skip:
            text = self.read()
            if text is None:
                raise zlib.error("the file is shorter than it was")
            offset = skip - text.skip
            if len(text.data) > offset:
                self._rest = _Text(text.start, skip, text.data[offset:])

    def read(self) -> _Text | None:
        """The next text; None at the current end. May be called again after _DamagedMember."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        while True:
            if self._damage is not None:
                damage = self._damage
                self._begin_after(self._start)
                raise damage
            if self._inflate.eof:
                unused = self._inflate.unused_data
                self._begin(self._file.tell() - len(unused), unused)
            data = self._input or self._file.read(CHUNK_BYTES)
            self._input = b""
            if not data:
                return None
            self._consumed = True
            before = self._inflate.copy()
            try:
                text = self._inflate.decompress(data)
            except zlib.error as error:
                text = _text_before_damage(before, data)
                self._damage = _DamagedMember(self._start, error)
            if text:
                at, self._skip = self._skip, self._skip + len(text)
                return _Text(self._start, at, text)

    def _begin_after(self, start: int) -> None:
        """Continue with the first member that begins after byte `start`, else at the end."""
        at, tail = start + 1, b""
        self._file.seek(at)
        while piece := self._file.read(CHUNK_BYTES):
            if (found := MEMBER.search(tail + piece)) is not None:
                at += found.start() - len(tail)
                break
            at += len(piece)
            tail = (tail + piece)[1 - MEMBER_BYTES :]
        self._file.seek(at)
        self._begin(at, b"")

    def _begin(self, start: int, rest: bytes) -> None:
        self._start, self._skip = start, 0
        self._input = rest
        self._inflate = zlib.decompressobj(wbits=31)
        self._damage = None
        self._consumed = False


def _text_before_damage(inflate: zlib._Decompress, data: bytes) -> bytes:
    """The text of `data` up to the byte at which `inflate` fails."""
    text = bytearray()
    with contextlib.suppress(zlib.error):
        for at in range(len(data)):
            text += inflate.decompress(data[at : at + 1])
    return bytes(text)


class Lines:
    """Reads lines with `next`; a context manager that closes the file."""

    def __init__(self, path: Path, content: BinaryIO | None = None) -> None:
        """Reads `content`, else the file; raises RecordingError if that cannot be opened."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb") if content is None else content
            magic = self._file.read(2)
            self._file.seek(0)
        except OSError as error:
            raise RecordingError(path, f"cannot be read: {error.strerror or error}") from error
        self.compressed = magic == GZIP_MAGIC
        self._source = _Gzip(self._file) if self.compressed else _Plain(self._file)
        self._ready: deque[tuple[Place, bytes]] = deque()
        self._tail = io.BytesIO()  # an incomplete line at the current end
        self._tail_at: tuple[int, int] | None = None
        self._number = 1

    def close(self) -> None:
        self._file.close()

    @property
    def truncated(self) -> str:
        """What is missing at the current end; empty if the file ends with a complete line."""
        if self._ready:
            return ""
        if size := self._tail.tell():
            return f"line {self._number:,} is cut off after {size:,} bytes"
        return "the last gzip member is not finished" if self._source.inside else ""

    def seek(self, place: Place) -> None:
        """Continue `next` with the line at `place`; raises RecordingError."""
        self._ready.clear()
        self._tail, self._tail_at = io.BytesIO(), None
        self._number = place.number
        try:
            self._source.seek(place.start, place.skip)
        except (OSError, zlib.error, _DamagedMember) as error:
            reason = f"cannot seek to this line: {error}"
            raise RecordingError(self.path, reason, place.number) from error

    def next(self) -> tuple[Place, bytes] | None:
        """The next complete line without its newline; None if there is none yet.

        Raises DamageError, after which it continues behind the damage, and RecordingError.
        """
        while not self._ready:
            try:
                text = self._source.read()
            except _DamagedMember as damage:
                self._tail, self._tail_at = io.BytesIO(), None
                raise DamageError(self.path, str(damage), self._number) from damage
            except OSError as error:
                reason = f"cannot be read: {error.strerror or error}"
                raise RecordingError(self.path, reason, self._number) from error
            if text is None:
                return None
            self._split(text)
        return self._ready.popleft()

    def _split(self, text: _Text) -> None:
        start, at, data = text
        first = 0
        while (end := data.find(b"\n", first)) >= 0:
            where, line = (start, at + first), data[first:end]
            if self._tail_at is not None:
                where, line = self._tail_at, self._tail.getvalue() + line
                self._tail, self._tail_at = io.BytesIO(), None
            self._ready.append((Place(*where, self._number), line))
            self._number += 1
            first = end + 1
        if first < len(data):
            if self._tail_at is None:
                self._tail_at = (start, at + first)
            self._tail.write(data[first:])
            if self._tail.tell() > MAX_LINE_BYTES:
                reason = f"longer than {MAX_LINE_BYTES:,} bytes: not a recording"
                raise RecordingError(self.path, reason, self._number)
