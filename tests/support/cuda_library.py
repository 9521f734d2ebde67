"""An ELF file with fat binaries, as the CUDA compiler makes them, of any bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from scripts.gpu_kit.cuda_code import CUBIN, ENTRY, FAT_BINARIES, HEADER, MAGIC, NOBITS, PTX

Code = tuple[int, int, bytes]  # kind, sm, contents
TEXT = b"host code" * 11


def fat_binary(codes: Sequence[Code]) -> bytes:
    padded = [(kind, sm, code + bytes(-len(code) % 8)) for kind, sm, code in codes]
    entries = [ENTRY.pack(kind, 257, ENTRY.size, len(code), sm) + code for kind, sm, code in padded]
    body = b"".join(entries)
    return HEADER.pack(MAGIC, 1, HEADER.size, len(body)) + body


def library(
    fat_binaries: Sequence[Sequence[Code]],
    *,
    section: str = FAT_BINARIES,
    symbols: bytes = b"names",
) -> bytes:
    """`fat_binaries` in one section, eight bytes of padding behind each; host code, symbols."""
    fat = b"".join(fat_binary(codes) + bytes(8) for codes in fat_binaries)
    contents = {"": b"", ".text": TEXT, section: fat, ".bss": b"", ".strtab": symbols}
    contents[".shstrtab"] = b"\0".join([*(name.encode() for name in contents), b".shstrtab", b""])
    body, rows, at = b"", [], 64
    for name, data in contents.items():
        kind = NOBITS if name == ".bss" else 1
        start = contents[".shstrtab"].index(name.encode() + b"\0")
        rows.append(struct.pack("<IIQQQQIIQQ", start, kind, 0, 0, at, len(data), 0, 0, 1, 0))
        body, at = body + data, at + len(data)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, len(rows), 5)
    return head + body + b"".join(rows)


EVERY_CASE: list[list[Code]] = [
    [(CUBIN, 80, b"old" * 9), (CUBIN, 90, b"wanted" * 5), (PTX, 90, b"text" * 7)],
    [(PTX, 75, b"older text"), (PTX, 80, b"newest that compiles"), (PTX, 100, b"too new")],
    [(CUBIN, 80, b"ampere alone" * 4)],
    [(CUBIN, 90, b"one" * 8), (CUBIN, 90, b"two" * 8)],
    [(CUBIN, 100, b"tiny")],
]
