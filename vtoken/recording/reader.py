"""Reads a recording: documents in order, from the start or from a key frame.

Knows the wire and lines. Memory does not grow with the file. A torn end is said in `torn` and is
no error; a damaged line before it is one that names file and line. Recordings without a header, of
`hello` first, are read too. `next` leaves out lines of a type that it does not know: they are of a
newer vToken.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, get_args

import msgspec

from vtoken import wire
from vtoken.recording.errors import RecordingError
from vtoken.recording.lines import Lines, Place

EXPECTED = "expected a `recording` or a `hello` line first, as `vtoken record` writes them"


TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(wire.RecordingLine))


class Entry(NamedTuple):
    """One line and where it stands."""

    place: Place
    line: wire.RecordingLine


class _Typed(msgspec.Struct):
    type: str


class RecordingReader:
    """The recording at `path`; raises RecordingError when it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: wire.RecordingHeader | None = None
        self._decoder = msgspec.json.Decoder(wire.RecordingLine)
        self._typed = msgspec.json.Decoder(_Typed)
        self._lines = Lines(path)
        try:
            self._check_start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    @property
    def torn(self) -> str:
        """What is missing at the end that was reached, in words; empty when nothing is."""
        return self._lines.torn

    def raw(self) -> tuple[Place, bytes] | None:
        """The next line as it stands in the file; None at the present end."""
        return self._lines.next()

    def next(self) -> Entry | None:
        """The next document; None at the present end, where a later call may find more."""
        while (found := self._lines.next()) is not None:
            try:
                return Entry(found[0], self.decode(*found))
            except RecordingError:
                if not self.is_of_another_type(found[1]):
                    raise
        return None

    def seek(self, place: Place) -> None:
        """Go to a place that `next` or `scan` has answered."""
        self._lines.seek(place)

    def rewind(self) -> None:
        self.seek(Place(0, 0, 1))

    def decode(self, place: Place, line: bytes) -> wire.RecordingLine:
        """The document of a line; raises RecordingError naming file and line."""
        try:
            document: wire.RecordingLine = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RecordingError(self.path, f"not a recording: {error}", place.number) from error
        if isinstance(document, wire.RecordingHeader):
            self._check_schema(document.schema, wire.RECORDING_SCHEMA, place.number)
        elif isinstance(document, wire.Hello):
            self._check_schema(document.schema, wire.SCHEMA_VERSION, place.number)
        return document

    def is_of_another_type(self, line: bytes) -> bool:
        """Whether a line is a document of a type that this version does not know."""
        try:
            return self._typed.decode(line).type not in TYPES
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False

    def _check_start(self) -> None:
        first = self.next()
        if first is None:
            raise RecordingError(self.path, f"holds no whole line; {EXPECTED}")
        if isinstance(first.line, wire.RecordingHeader):
            self.header = first.line
        elif not isinstance(first.line, wire.Hello):
            raise RecordingError(self.path, EXPECTED, first.place.number)
        self.rewind()

    def _check_schema(self, schema: int, newest: int, number: int) -> None:
        if schema > newest:
            reason = f"schema {schema} is of a newer vToken; this one reads {newest}"
            raise RecordingError(self.path, reason, number)
