"""Reads a recording: documents in order, from the start or from a key frame.

Memory use does not grow with the file. An incomplete end is no error; `truncated` describes it.
Damaged lines and parts are skipped; `damage` names the first. Recordings without a header, with a
`hello` first, are accepted. `next` skips lines of unknown types, which a newer vToken wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeVar, get_args

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder, MalformedError
from vtoken.recording.errors import DamageError, RecordingError
from vtoken.recording.lines import Lines, Place

T = TypeVar("T")

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

    Raises RecordingError if it is not a recording.
    """

    def __init__(self, path: Path, content: BinaryIO | None = None) -> None:
        self.path = path
        self.header: wire.RecordingHeader | None = None
        self._damage: RecordingError | None = None  # the first
        self._num_damaged = 0
        self._last_damaged = 0  # the highest line number among them
        self._lines = Lines(path, content)
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
        self._lines.close()

    @property
    def truncated(self) -> str:
        """What is missing at the current end; empty if nothing is."""
        return self._lines.truncated

    @property
    def damage(self) -> RecordingError | None:
        """What was skipped so far as damaged: the first place, and the number of others."""
        if self._damage is None or self._num_damaged == 1:
            return self._damage
        places = "place" if self._num_damaged == 2 else "places"
        more = f"; and {self._num_damaged - 1:,} more damaged {places}"
        return RecordingError(self.path, self._damage.reason + more, self._damage.line)

    def raw(self) -> tuple[Place, bytes] | None:
        """The next line, not decoded; None at the current end. Raises RecordingError."""
        while True:
            try:
                return self._lines.next()
            except DamageError as damage:
                self._note(damage)

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
                self._note(DamageError(self.path, f"damaged: {error}", place.number))
            return None

    def seek(self, place: Place) -> None:
        """Go to a place that `next` or `scan` has returned."""
        self._lines.seek(place)

    def rewind(self) -> None:
        self.seek(Place(0, 0, 1))

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
        if isinstance(first, wire.RecordingHeader):
            self.header = first
        elif not isinstance(first, wire.Hello):
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
