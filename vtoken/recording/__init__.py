"""Recordings of the stream: written line by line, read without loading the complete file.

A recording is text, one JSON document a line, gzip-compressed if its name ends in `.gz`: a header,
then stream messages in order of arrival, and audit lines. It never holds text of requests.

1. A killed writer loses at most the last `FLUSH_S`; everything written before stays readable.
2. An existing file is never overwritten. A damaged part costs nothing but itself.
3. Every `hello` followed by its `snapshot` is a key frame: reading can begin there.
"""

from vtoken.recording.errors import RecordingError, RecordingExistsError
from vtoken.recording.index import Index, Keyframe, Mark, scan
from vtoken.recording.pieces import Place
from vtoken.recording.reader import Entry, RecordingReader
from vtoken.recording.writer import RecordingWriter

__all__ = [
    "Entry",
    "Index",
    "Keyframe",
    "Mark",
    "Place",
    "RecordingError",
    "RecordingExistsError",
    "RecordingReader",
    "RecordingWriter",
    "scan",
]
