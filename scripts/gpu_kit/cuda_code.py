"""Leaves the machine code of one GPU architecture in a CUDA library, so that it packs small.

A CUDA library keeps its device code in the section `.nv_fatbin`: fat binaries, each with the same
kernels for several architectures, as machine code (cubin) or as PTX. `only` keeps in each what a
GPU of `sm` would load: its own machine code; without any, that of the newest older minor version
and the newest PTX that the driver can compile for it. What is kept moves to the front of its fat
binary, which shrinks; the rest becomes zeros. A fat binary without code for this GPU keeps one
small entry of another, so that it stays well-formed and answers "no kernel image". Debug symbols
become zeros too. Nothing else changes, and nothing changes its place: `verify` proves both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC, PTX, CUBIN = 0xBA55ED50, 1, 2
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes after it
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of the header, bytes after it, sm
FAT_BINARIES, SYMBOLS = ".nv_fatbin", (".symtab", ".strtab")
NOBITS = 8  # type of a section without bytes in the file


@dataclass(frozen=True, slots=True)
class Entry:
    """Code for one architecture; `at` and `size` in bytes, with its header."""

    kind: int
    sm: int
    at: int
    size: int

    def bytes_in(self, library: bytes) -> bytes:
        return library[self.at : self.at + self.size]


@dataclass(frozen=True, slots=True)
class FatBinary:
    at: int
    size: int  # after the header
    entries: tuple[Entry, ...]

    def wanted(self, sm: int) -> tuple[Entry, ...]:
        """What a GPU of `sm` would load; empty: nothing."""
        cubins = [e for e in self.entries if e.kind == CUBIN and e.sm // 10 == sm // 10]
        exact = tuple(e for e in cubins if e.sm == sm)
        older = [e for e in cubins if e.sm < sm]
        text = [e for e in self.entries if e.kind == PTX and e.sm <= sm]
        return exact or tuple(max(g, key=lambda e: e.sm) for g in (older, text) if g)


def sections(library: bytes) -> dict[str, slice]:
    """Where each section of an ELF file is. Raises ValueError if it is none of 64 bits."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", library, table + i * size) for i in range(count)]
    found = {}
    for name, kind, _, _, at, length, *_ in rows:
        start = rows[names][4] + name
        text = library[start : library.index(b"\0", start)].decode()
        found[text] = slice(at, at + (0 if kind == NOBITS else length))
    return found


def fat_binaries(library: bytes) -> Iterator[FatBinary]:
    """All of them in order. Raises ValueError if there are none, or if sizes do not add up."""
    where = sections(library).get(FAT_BINARIES)
    if where is None:
        raise ValueError(f"no section {FAT_BINARIES}: no CUDA library")
    at = where.start
    while at + HEADER.size <= where.stop:
        magic, version, header, size = HEADER.unpack_from(library, at)
        if magic != MAGIC:
            at += 8  # padding, or what `only` took out
            continue
        end = at + header + size
        if version != 1 or header != HEADER.size or end > where.stop:
            raise ValueError(f"fat binary at {at}: version {version}, {header} + {size} bytes")
        entries, entry = [], at + header
        while entry < end:
            kind, _, head, length, sm = ENTRY.unpack_from(library, entry)
            if kind not in (PTX, CUBIN) or head < ENTRY.size or entry + head + length > end:
                raise ValueError(f"entry at {entry}: kind {kind}, {head} + {length} bytes")
            entries.append(Entry(kind, sm, entry, head + length))
            entry += head + length
        yield FatBinary(at, size, tuple(entries))
        at = end


def only(library: bytes, sm: int) -> bytes:
    """`library` with the code for `sm` alone, in as many bytes. Raises ValueError, see above."""
    slimmed, found = bytearray(library), [*fat_binaries(library)]
    others = [e for fat in found for e in fat.entries if e.kind == CUBIN and e.sm // 10 != sm // 10]
    for fat in found:
        keep = fat.wanted(sm)
        if not keep:
            fitting = [e for e in others if e.size <= fat.size]
            keep = (min(fitting, key=lambda e: e.size),) if fitting else fat.entries
        code = b"".join(e.bytes_in(library) for e in keep)
        start = fat.at + HEADER.size
        slimmed[start : start + fat.size] = code.ljust(fat.size, b"\0")
        HEADER.pack_into(slimmed, fat.at, MAGIC, 1, HEADER.size, len(code))
    for where in (sections(library).get(name) for name in SYMBOLS):
        if where is not None:
            slimmed[where] = bytes(where.stop - where.start)
    return bytes(slimmed)


def verify(library: bytes, slimmed: bytes, sm: int) -> int:
    """Prove that `slimmed` has the code of `library` for `sm`; return how many entries it has.

    Raises ValueError at the first byte or entry that should be equal and is not.
    """
    where = sections(library)
    changed = sorted((where[n] for n in (FAT_BINARIES, *SYMBOLS) if n in where), key=_start)
    before = 0
    for at, end in [*((s.start, s.stop) for s in changed), (len(library), len(library))]:
        if library[before:at] != slimmed[before:at]:
            raise ValueError(f"bytes between {before} and {at} differ")
        before = end
    if len(library) != len(slimmed):
        raise ValueError(f"{len(slimmed)} bytes instead of {len(library)}")
    kept = 0
    there = {fat.at: fat for fat in fat_binaries(slimmed)}
    for fat in fat_binaries(library):
        entries = [e.bytes_in(library) for e in fat.wanted(sm)]
        mine = there.pop(fat.at, FatBinary(fat.at, 0, ()))
        if [e.bytes_in(slimmed) for e in mine.wanted(sm)] != entries or not mine.entries:
            raise ValueError(f"the fat binary at {fat.at} differs in its code for sm_{sm}")
        kept += len(entries)
    if there:
        raise ValueError(f"a fat binary at {min(there)} that the library does not have")
    return kept


def _start(where: slice) -> int:
    return int(where.start)
