"""Reads a recording: documents in order, from the start or from a key frame.

Memory use does not grow with the file. An incomplete end is no error; `truncated` describes it.
Damaged lines and parts are skipped; `damage` names the first. Recordings without a header, with a
`hello` first, are accepted. `next` skips lines of unknown types, which a newer vToken wrote.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeVar, get_args

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken.recording.errors import RecordingError
from vtoken.recording.pieces import GZIP_MAGIC, Piece, Place, inflated, plain

T = TypeVar("T")

MAX_LINE_BYTES = 64 * 1024 * 1024
EXPECTED = "expected a `recording` or a `hello` line first, as `vtoken record` writes them"


TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(wire.RecordingLine))


class Entry(NamedTuple):
    """One line and its place."""

    place: Place
    line: wire.RecordingLine


class _Typed(msgspec.Struct):
    type: str


_documents: Decoder[wire.RecordingLine] = Decoder(wire.RecordingLine)
_types: Decoder[_Typed] = Decoder(_Typed)


class RecordingReader:
    """The recording at `path`, or in `content` under this name.

    Raises RecordingError if it cannot be opened or is not a recording.
    """

    def __init__(self, path: Path, content: BinaryIO | None = None) -> None:
        self.path = path
        self._damage: RecordingError | None = None  # the first
        self._num_damaged = 0
        self._last_damaged = 0  # the highest line number among them
        try:
            self._file: BinaryIO = path.open("rb") if content is None else content
            self._compressed = self._file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        except OSError as error:
            raise RecordingError(path, f"cannot be read: {error.strerror or error}") from error
        self.rewind()
        try:
            self._check_start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def truncated(self) -> str:
        """What is missing at the current end; empty if the file ends with a complete line."""
        if self._ready:
            return ""
        if size := len(self._rest):
            return f"line {self._rest_at.number:,} is cut off after {size:,} bytes"
        return "the last gzip member is not finished" if self._in_member else ""

    @property
    def damage(self) -> RecordingError | None:
        """What was skipped so far as damaged: the first place, and the number of others."""
        if self._damage is None or self._num_damaged == 1:
            return self._damage
        places = "place" if self._num_damaged == 2 else "places"
        more = f"; and {self._num_damaged - 1:,} more damaged {places}"
        return RecordingError(self.path, self._damage.reason + more, self._damage.line)

    def raw(self) -> tuple[Place, bytes] | None:
        """The next complete line, not decoded; None at the current end. Raises RecordingError."""
        while not self._ready:
            try:
                piece = next(self._pieces)
            except OSError as error:
                self.seek(self._rest_at)  # the generator has ended; a later call tries again
                reason = f"cannot be read: {error.strerror or error}"
                raise RecordingError(self.path, reason, self._rest_at.number) from error
            if piece.damage:
                self._rest.clear()
                self._note(RecordingError(self.path, piece.damage, self._rest_at.number))
            elif piece.data:
                self._split(piece)
            else:
                self._in_member = self._compressed and self._file.tell() > piece.start
                return None
        return self._ready.popleft()

    def next(self) -> Entry | None:
        """The next document; None at the current end, where a later call may find more.

        Raises RecordingError for one of a newer schema.
        """
        while (found := self.raw()) is not None:
            place, line = found
            document = self.parse(_documents, place, line)
            if document is not None:
                self._check(document, place)
                return Entry(place, document)
        return None

    def parse(self, decoder: Decoder[T], place: Place, line: bytes) -> T | None:
        """The document of a line; None if it is damaged (see `damage`) or of an unknown type."""
        try:
            return decoder.decode(line)
        except MalformedError as error:
            if not self._is_of_another_type(line):
                self._note(RecordingError(self.path, f"damaged: {error}", place.number))
            return None

    def seek(self, place: Place) -> None:
        """Go to a place that `next` or `scan` has returned."""
        self._pieces = (
            inflated(self._file, place.start, place.skip)
            if self._compressed
            else plain(self._file, place.skip)
        )
        self._ready: deque[tuple[Place, bytes]] = deque()
        self._rest, self._rest_at = bytearray(), place  # an incomplete line at the current end
        self._in_member = False  # whether the text read so far ends inside a gzip member

    def rewind(self) -> None:
        self.seek(Place(0, 0, 1))

    def _split(self, piece: Piece) -> None:
        """Add the lines that `piece` completes."""
        *lines, rest = piece.data.split(b"\n")
        number, at = self._rest_at.number, piece.skip
        for line in lines:
            place = self._rest_at if self._rest else Place(piece.start, at, number)
            self._ready.append((place, bytes(self._rest) + line))
            self._rest.clear()
            number += 1
            at += len(line) + 1
        if not self._rest:
            self._rest_at = Place(piece.start, at, number)
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            reason = f"longer than {MAX_LINE_BYTES:,} bytes: not a recording"
            raise RecordingError(self.path, reason, number)

    def _is_of_another_type(self, line: bytes) -> bool:
        """Whether a line is a document of an unknown type."""
        try:
            return _types.decode(line).type not in TYPES
        except MalformedError:
            return False

    def _note(self, damage: RecordingError) -> None:
        """Count a damaged place once, also if it is read again after a seek."""
        self._damage = self._damage or damage
        if (line := damage.line or 0) > self._last_damaged:
            self._last_damaged = line
            self._num_damaged += 1

    def _check_start(self) -> None:
        """The first line that can be decompressed must be a header or a hello."""
        found = self.raw()
        if found is None:
            raise self._damage or RecordingError(self.path, f"holds no complete line; {EXPECTED}")
        place, line = found
        try:
            first = _documents.decode(line)
        except MalformedError as error:
            raise RecordingError(self.path, f"not a recording: {error}", place.number) from error
        self._check(first, place)
        if not isinstance(first, wire.RecordingHeader | wire.Hello):
            raise RecordingError(self.path, EXPECTED, place.number)
        self.rewind()

    def _check(self, document: wire.RecordingLine, place: Place) -> None:
        """Raises RecordingError for a document of a newer schema."""
        if isinstance(document, wire.RecordingHeader):
            self._check_schema(document.schema, wire.RECORDING_SCHEMA, place.number)
        elif isinstance(document, wire.Hello):
            self._check_schema(document.schema, wire.SCHEMA_VERSION, place.number)

    def _check_schema(self, schema: int, newest: int, number: int) -> None:
        if schema > newest:
            reason = f"schema {schema} is of a newer vToken; this one reads up to {newest}"
            raise RecordingError(self.path, reason, number)
