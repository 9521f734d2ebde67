"""The text of a file, plain or gzip, piece by piece, from any place on.

Gzip is detected by the file's first bytes, not by its name; it may have several members. Nothing
ends at the end of the file, since it may still be growing. After damage in a gzip member, reading
continues with the next member that begins behind it.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

CHUNK_BYTES = 16 * 1024
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


class Piece(NamedTuple):
    """Text at `skip` after byte `start`: empty at the current end, and where `damage` is."""

    start: int
    skip: int
    data: bytes
    damage: str = ""


def plain(file: BinaryIO, at: int) -> Iterator[Piece]:
    """The text from byte `at` on; never ends."""
    file.seek(at)
    while True:
        data = file.read(CHUNK_BYTES)
        yield Piece(0, at, data)
        at += len(data)


def inflated(file: BinaryIO, start: int, skip: int) -> Iterator[Piece]:
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
                yield Piece(start, at - len(new), new)
                skip = at
        start = _member_after(file, start) if damage else file.tell() - len(inflate.unused_data)
        skip = 0
        if damage:
            yield Piece(start, 0, b"", damage)


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
