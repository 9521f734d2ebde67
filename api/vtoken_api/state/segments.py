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
    """One file; `start_ts` in Unix seconds. An open one may end in the middle of a line."""

    path: Path
    start_ts: float
    open: bool
    num_bytes: int


class Segments:
    """The segments in one directory, shared by the processes of one server."""

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
                        size = path.stat().st_size
                        found.append(Segment(path, int(match[1]) / 1000, bool(match[2]), size))
        return sorted(found, key=lambda segment: segment.path.name)

    def newest_write_ts(self) -> float:
        """The time of the last write to a segment, Unix seconds; 0 if there is none."""
        newest = 0.0
        for segment in self.listed()[-2:]:
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, segment.path.stat().st_mtime)
        return newest

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
        segments = self.listed()
        ends = [*(segment.start_ts for segment in segments[1:]), float("inf")]
        return [segment for segment, end in zip(segments, ends, strict=True) if end > ts]


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
