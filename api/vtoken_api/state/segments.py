"""The flight recorder's files: listing, selection by time, pruning.

A segment is a complete recording, and so are several concatenated segments. The segment being
written has `.open` in its name, which stays if its writer is killed.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vtoken.recording import RecordingError, RecordingReader

MAX_AGE_S = 24 * 3600.0
CHUNK_BYTES = 256 * 1024
_NAME = re.compile(r"flight-(\d{13})-\d+(\.open)?\.jsonl\.gz")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file; times in Unix seconds. An open one may end in the middle of a line."""

    path: Path
    start_ts: float
    end_ts: float  # of the last write
    open: bool
    num_bytes: int


class Segments:
    """The segments in one directory."""

    def __init__(self, directory: Path, *, max_bytes: int, max_age_s: float = MAX_AGE_S) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s

    def new_path(self) -> Path:
        """The name of a segment that begins now; makes the directory (0700)."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.directory / f"flight-{time.time() * 1000:013.0f}-{os.getpid()}.open.jsonl.gz"

    def finish(self, path: Path) -> None:
        """Rename a completed segment."""
        path.rename(path.with_name(path.name.replace(".open.", ".")))

    def listed(self) -> list[Segment]:
        """All segments, oldest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.directory.iterdir():
                match = _NAME.fullmatch(path.name)
                with contextlib.suppress(FileNotFoundError):
                    if match:
                        stat = path.stat()
                        found.append(
                            Segment(
                                path,
                                start_ts=int(match[1]) / 1000,
                                end_ts=stat.st_mtime,
                                open=bool(match[2]),
                                num_bytes=stat.st_size,
                            )
                        )
        return sorted(found, key=lambda segment: segment.path.name)

    def prune(self, reserve_bytes: int = 0) -> None:
        """Delete expired segments, then the oldest until `reserve_bytes` more fit the bound."""
        segments = self.listed()
        total = sum(segment.num_bytes for segment in segments)
        oldest_ts = time.time() - self.max_age_s
        for segment in segments:
            if total + reserve_bytes <= self.max_bytes and segment.start_ts >= oldest_ts:
                break
            segment.path.unlink(missing_ok=True)
            total -= segment.num_bytes

    def since(self, ts: float) -> list[Segment]:
        """The segments that cover the time from `ts` on; the first begins earlier, at a key
        frame."""
        return [segment for segment in self.listed() if segment.end_ts > ts]


def chunks(segment: Segment) -> Iterator[bytes]:
    """The segment as complete gzip members; nothing if it has been deleted."""
    if segment.open:
        with contextlib.suppress(RecordingError), RecordingReader(segment.path) as reader:
            lines = [line + b"\n" for _, line in iter(reader.raw, None)]
            yield gzip.compress(b"".join(lines), 1)
        return
    with contextlib.suppress(FileNotFoundError), segment.path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield data
