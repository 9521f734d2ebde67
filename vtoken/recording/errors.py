"""What can be wrong with a recording.

RecordingError                 cannot be read or written; names the file, and the line where known
└── RecordingExistsError       a file of that name exists; nothing was written
"""

from __future__ import annotations

from pathlib import Path


class RecordingError(Exception):
    """`line` counts from 1; None where no line is to blame."""

    def __init__(self, path: Path, reason: str, line: int | None = None) -> None:
        where = str(path) if line is None else f"{path}, line {line:,}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.reason = reason
        self.line = line


class RecordingExistsError(RecordingError):
    """The file is there already."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "exists already; name another file, or remove it")
