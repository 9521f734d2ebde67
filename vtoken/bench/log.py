"""Finished samples, one JSON line each; an interrupted run goes on where it stopped.

A sample is found again by its key: everything that its value depends on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

Key = dict[str, Any]


class Entry(msgspec.Struct):
    key: Key
    value: Any
    seconds: float = 0.0  # that it took, others running beside it


class Log:
    """The file is made with the first entry; a line that a crash cut off is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[bytes, Entry] = {}
        self._broken = False  # the last line has no end
        if not path.exists():
            return
        text = path.read_bytes()
        self._broken = not text.endswith(b"\n")
        for line in text.splitlines():
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError:
                continue
            self._entries[_canonical(entry.key)] = entry

    def get(self, key: Key) -> Any:
        """The value of `key`, None while there is none."""
        entry = self._entries.get(_canonical(key))
        return None if entry is None else entry.value

    def seconds(self, key: Key) -> float:
        """What the value of `key` took, 0 while there is none."""
        entry = self._entries.get(_canonical(key))
        return 0.0 if entry is None else entry.seconds

    def add(self, key: Key, value: Any, seconds: float) -> None:
        line = msgspec.json.encode(Entry(key, value, seconds)) + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"\n" + line if self._broken else line)
        self._broken = False
        # As it will be read again: floats and keys of objects go through JSON.
        self._entries[_canonical(key)] = msgspec.json.decode(line, type=Entry)


def _canonical(key: Key) -> bytes:
    return msgspec.json.encode(key, order="sorted")
