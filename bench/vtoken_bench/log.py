"""A log of finished samples, one JSON line each, from which an interrupted run resumes.

The key of a sample holds everything that its value depends on. The log adds the version of the code
to it, so a measurement of other code is never used again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from vtoken_bench.code import code_version, commit

Key = dict[str, Any]


class Entry(msgspec.Struct):
    """`at`: when it was measured; `commit`: of the code, for people."""

    key: Key
    value: Any
    seconds: float = 0.0  # wall time, with other samples in flight
    at: str = ""
    commit: str = ""


class Log:
    """The file is created with the first entry. A truncated line is ignored.

    `code`: the version of the measured code; None: of this code.
    """

    @classmethod
    def opened(cls, path: Path, *, again: bool) -> Log:
        """`again`: without what was measured before."""
        if again:
            path.unlink(missing_ok=True)
        return cls(path)

    def __init__(self, path: Path, code: str | None = None) -> None:
        self.path = path
        self._code = code_version() if code is None else code
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

    def entry(self, key: Key) -> Entry | None:
        return self._entries.get(_canonical(self._whole(key)))

    def get(self, key: Key) -> Any:
        """The value of `key`; None if there is none."""
        entry = self.entry(key)
        return None if entry is None else entry.value

    def seconds(self, key: Key) -> float:
        """Time that the value of `key` took; 0 if there is none."""
        entry = self.entry(key)
        return 0.0 if entry is None else entry.seconds

    def entries(self) -> list[Entry]:
        """All of the file, of any code."""
        return [*self._entries.values()]

    def add(self, key: Key, value: Any, seconds: float) -> None:
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        entry = Entry(self._whole(key), value, seconds, at, commit())
        line = msgspec.json.encode(entry) + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"\n" + line if self._truncated else line)
        self._truncated = False
        # Keep what a later run will read: JSON changes floats and the keys of objects.
        self._entries[_canonical(entry.key)] = msgspec.json.decode(line, type=Entry)

    def _whole(self, key: Key) -> Key:
        return key | {"code": self._code}


def _canonical(key: Key) -> bytes:
    return msgspec.json.encode(key, order="sorted")
