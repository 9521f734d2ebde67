"""Recordings of the stream: written line by line, read without loading all of it.

Knows the wire only. A recording is text, one JSON document a line, gzip where its name ends in
`.gz`: a header, then stream messages as they came, audit lines and, if asked for, text of requests.

1. A killed writer loses at most its last moment; what was written before stays readable.
2. An existing file is never written over.
3. Every `hello` with the `snapshot` behind it is a key frame: reading can begin there.
"""

from vtoken.recording.errors import RecordingError, RecordingExistsError
from vtoken.recording.index import Index, Keyframe, Mark, Text, scan
from vtoken.recording.lines import Place
from vtoken.recording.reader import Entry, RecordingReader
from vtoken.recording.recorder import Recorder
from vtoken.recording.writer import RecordingWriter

__all__ = [
    "Entry",
    "Index",
    "Keyframe",
    "Mark",
    "Place",
    "Recorder",
    "RecordingError",
    "RecordingExistsError",
    "RecordingReader",
    "RecordingWriter",
    "Text",
    "scan",
]
