"""A log of finished samples, one JSON line each, from which an interrupted run resumes.

The key of a sample holds everything that its value depends on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

Key = dict[str, Any]


class Entry(msgspec.Struct):
    key: Key
    value: Any
    seconds: float = 0.0  # wall time, with other samples in flight


class Log:
    """The file is created with the first entry. A truncated line is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[bytes, Entry] = {}
        self._truncated = False  # the last line has no newline
        if not path.exists():
            return
        text = path.read_bytes()
        self._truncated = not text.endswith(b"\n")
        for line in text.splitlines():
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError:
                continue
            self._entries[_canonical(entry.key)] = entry

    def get(self, key: Key) -> Any:
        """The value of `key`; None if there is none."""
        entry = self._entries.get(_canonical(key))
        return None if entry is None else entry.value

    def seconds(self, key: Key) -> float:
        """Time that the value of `key` took; 0 if there is none."""
        entry = self._entries.get(_canonical(key))
        return 0.0 if entry is None else entry.seconds

    def add(self, key: Key, value: Any, seconds: float) -> None:
        line = msgspec.json.encode(Entry(key, value, seconds)) + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"\n" + line if self._truncated else line)
        self._truncated = False
        # Keep what a later run will read: JSON changes floats and the keys of objects.
        self._entries[_canonical(key)] = msgspec.json.decode(line, type=Entry)


def _canonical(key: Key) -> bytes:
    return msgspec.json.encode(key, order="sorted")
