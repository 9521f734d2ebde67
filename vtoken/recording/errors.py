"""The errors of recordings.

RecordingError                 cannot be read or written; names the file, and the line if known
└── RecordingExistsError       a file of that name exists; nothing was written
"""

from __future__ import annotations

from pathlib import Path


class RecordingError(Exception):
    """A recording that cannot be read or written; `line` from 1, or None if no line is at fault."""

    def __init__(self, path: Path, reason: str, line: int | None = None) -> None:
        where = str(path) if line is None else f"{path}, line {line:,}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.reason = reason
        self.line = line


class RecordingExistsError(RecordingError):
    """The file exists already."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "exists already; choose another name or remove it")
