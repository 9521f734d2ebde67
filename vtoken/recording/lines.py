"""The lines of a file, plain or gzip, one at a time, with seeking to lines read before.

Gzip is detected by the file's first bytes, not by its name; it may have several members. `next`
returns None at the current end and may be called again, since the file may still be growing. After
damage in a gzip member, reading continues with the next member that begins behind it.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import deque
from collections.abc import Iterator
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
    """Text at `skip` after byte `start`: empty at the current end, and where `damage` is."""

    start: int
    skip: int
    data: bytes
    damage: str = ""


def _plain(file: BinaryIO, at: int) -> Iterator[_Text]:
    """The text from byte `at` on; never ends."""
    file.seek(at)
    while True:
        data = file.read(CHUNK_BYTES)
        yield _Text(0, at, data)
        at += len(data)


def _inflated(file: BinaryIO, start: int, skip: int) -> Iterator[_Text]:
    """The text of all gzip members, from `skip` bytes into the one at byte `start`; never ends."""
    while True:
        file.seek(start)
        inflate, at, damage = zlib.decompressobj(wbits=31), 0, ""
        while not inflate.eof and not damage:
            data = file.read(CHUNK_BYTES)
            before = inflate.copy()
            try:
                text = inflate.decompress(data)
            except zlib.error as error:
                text = _text_before_damage(before, data)
                damage = f"damaged after byte {start:,}: {error}"
            at += len(text)
            if at > skip or not data:
                new = text[-(at - skip) :] if at > skip else b""
                yield _Text(start, at - len(new), new)
                skip = at
        start = _member_after(file, start) if damage else file.tell() - len(inflate.unused_data)
        skip = 0
        if damage:
            yield _Text(start, 0, b"", damage)


def _text_before_damage(inflate: zlib._Decompress, data: bytes) -> bytes:
    """The text of `data` up to the byte at which `inflate` fails."""
    text = bytearray()
    with contextlib.suppress(zlib.error):
        for at in range(len(data)):
            text += inflate.decompress(data[at : at + 1])
    return bytes(text)


def _member_after(file: BinaryIO, start: int) -> int:
    """Where the first gzip member after byte `start` begins, else the end of the file."""
    at, tail = start + 1, b""
    file.seek(at)
    while piece := file.read(CHUNK_BYTES):
        if (found := MEMBER.search(tail + piece)) is not None:
            return at + found.start() - len(tail)
        at += len(piece)
        tail = (tail + piece)[1 - MEMBER_BYTES :]
    return at


class Lines:
    """Reads lines with `next`."""

    def __init__(self, path: Path, content: BinaryIO | None = None) -> None:
        """Reads `content`, else the file; raises RecordingError if that cannot be opened."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb") if content is None else content
            self._compressed = self._file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        except OSError as error:
            raise RecordingError(path, f"cannot be read: {error.strerror or error}") from error
        self.seek(Place(0, 0, 1))

    def close(self) -> None:
        self._file.close()

    def seek(self, place: Place) -> None:
        """Continue `next` with the line at `place`."""
        read = _inflated(self._file, place.start, place.skip)
        self._texts = read if self._compressed else _plain(self._file, place.skip)
        self._ready: deque[tuple[Place, bytes]] = deque()
        self._rest, self._rest_at = bytearray(), place  # an incomplete line at the current end
        self._in_member = False  # whether the text read so far ends inside a gzip member

    @property
    def truncated(self) -> str:
        """What is missing at the current end; empty if the file ends with a complete line."""
        if self._ready:
            return ""
        if size := len(self._rest):
            return f"line {self._rest_at.number:,} is cut off after {size:,} bytes"
        return "the last gzip member is not finished" if self._in_member else ""

    def next(self) -> tuple[Place, bytes] | None:
        """The next complete line without its newline; None if there is none yet.

        Raises DamageError, after which it continues behind the damage, and RecordingError.
        """
        while not self._ready:
            number = self._rest_at.number
            try:
                text = next(self._texts)
            except OSError as error:
                self.seek(self._rest_at)  # the generator has ended; a later call tries again
                reason = f"cannot be read: {error.strerror or error}"
                raise RecordingError(self.path, reason, number) from error
            if text.damage:
                self._rest.clear()
                raise DamageError(self.path, text.damage, number)
            if not text.data:
                self._in_member = self._compressed and self._file.tell() > text.start
                return None
            self._split(text)
        return self._ready.popleft()

    def _split(self, text: _Text) -> None:
        """Append the lines that `text` completes."""
        *lines, rest = text.data.split(b"\n")
        number, at = self._rest_at.number, text.skip
        for line in lines:
            place = self._rest_at if self._rest else Place(text.start, at, number)
            self._ready.append((place, bytes(self._rest) + line))
            self._rest.clear()
            number += 1
            at += len(line) + 1
        if not self._rest:
            self._rest_at = Place(text.start, at, number)
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            reason = f"longer than {MAX_LINE_BYTES:,} bytes: not a recording"
            raise RecordingError(self.path, reason, number)
