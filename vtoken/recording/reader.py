"""Reads a recording: documents in order, from the start or from a key frame.

Memory use does not grow with the file. An incomplete end is no error; `truncated` describes it. A
damaged line before the end raises an error with file and line. Recordings without a header, with a
`hello` first, are accepted. `next` skips lines of unknown types, which a newer vToken wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Self, get_args

import msgspec

from vtoken import wire
from vtoken.recording.errors import RecordingError
from vtoken.recording.lines import Lines, Place

EXPECTED = "expected a `recording` or a `hello` line first, as `vtoken record` writes them"


TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(wire.RecordingLine))


class Entry(NamedTuple):
    """One line and its place."""

    place: Place
    line: wire.RecordingLine


class _Typed(msgspec.Struct):
    type: str


class RecordingReader:
    """The recording at `path`; raises RecordingError if the file is not a recording."""

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()

    @property
    def truncated(self) -> str:
        """What is missing at the current end; empty if nothing is."""
        return self._lines.truncated

    def raw(self) -> tuple[Place, bytes] | None:
        """The next line, not decoded; None at the current end."""
        return self._lines.next()

    def next(self) -> Entry | None:
        """The next document; None at the current end, where a later call may find more."""
        while (found := self._lines.next()) is not None:
            try:
                return Entry(found[0], self.decode(*found))
            except RecordingError:
                if not self.is_of_another_type(found[1]):
                    raise
        return None

    def seek(self, place: Place) -> None:
        """Go to a place that `next` or `scan` has returned."""
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
        """Whether a line is a document of an unknown type."""
        try:
            return self._typed.decode(line).type not in TYPES
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False

    def _check_start(self) -> None:
        first = self.next()
        if first is None:
            raise RecordingError(self.path, f"holds no complete line; {EXPECTED}")
        if isinstance(first.line, wire.RecordingHeader):
            self.header = first.line
        elif not isinstance(first.line, wire.Hello):
            raise RecordingError(self.path, EXPECTED, first.place.number)
        self.rewind()

    def _check_schema(self, schema: int, newest: int, number: int) -> None:
        if schema > newest:
            reason = f"schema {schema} is of a newer vToken; this one reads up to {newest}"
            raise RecordingError(self.path, reason, number)
