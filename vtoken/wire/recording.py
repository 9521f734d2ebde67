"""The lines of a recording.

A recording is text, one JSON document a line, gzip-compressed if its name ends in `.gz`: a
`recording` line, then stream messages (format json) and `audit` lines, in the order of their ts.
Reading can start at every `hello` + `snapshot`. A reader skips lines of unknown types.
"""

from __future__ import annotations

from vtoken.wire.doc import Doc
from vtoken.wire.documents import AuditEntry
from vtoken.wire.stream import StreamMessage

RECORDING_SCHEMA = 2  # the newest that is read; recordings are written in schema 1


class RecordingHeader(Doc, tag_field="type", tag="recording"):
    schema: int
    vtoken_version: str
    created_ts: float
    source: str  # URL of the server, or "flight recorder"


class AuditLine(Doc, tag_field="type", tag="audit"):
    entry: AuditEntry


RecordingLine = RecordingHeader | AuditLine | StreamMessage
