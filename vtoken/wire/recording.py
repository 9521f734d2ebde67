"""The lines of a recording.

A recording is text, one JSON document a line, gzip-compressed if its name ends in `.gz`: a
`recording` line, then stream messages (format json), `audit` lines and, if text is recorded,
`text` lines, in the order of their ts. Reading can start at every `hello` + `snapshot`. A reader
skips lines of unknown types.
"""

from __future__ import annotations

from vtoken.wire.doc import Doc
from vtoken.wire.documents import AuditEntry, TextPage
from vtoken.wire.stream import StreamMessage

RECORDING_SCHEMA = 2  # with text; recordings without text are schema 1, which every reader reads


class RecordingHeader(Doc, tag_field="type", tag="recording"):
    schema: int
    vtoken_version: str
    created_ts: float
    source: str  # URL of the server, or "flight recorder"
    holds_text: bool = False  # whether `text` lines may follow


class AuditLine(Doc, tag_field="type", tag="audit"):
    entry: AuditEntry


class TextLine(Doc, tag_field="type", tag="text"):
    """The complete text of a request, as known after the previous message."""

    ts: float  # of that message
    page: TextPage  # every token whose text is known: `start` is 0


RecordingLine = RecordingHeader | AuditLine | TextLine | StreamMessage
