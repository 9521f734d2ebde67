"""The files of a flight recording: writing the newest, listing, selection by time, pruning.

A segment is a complete recording, and so are several concatenated segments. The segment being
written has `.open` in its name, which stays if its writer is killed.

1. Segments are ordered by the number in their name, which a wall clock cannot set back. Segments of
   earlier versions have no number and precede the others, ordered by their start.
2. A segment ends before the next one begins. Times that a clock wrote while it was ahead are
   corrected by this rule.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vtoken.recording import RecordingError, RecordingReader, RecordingWriter
from vtoken.recording.writer import FLIGHT_RECORDER
from vtoken_api.log import logger

MAX_BYTES = 64 * 1024 * 1024
MAX_AGE_S = 24 * 3600.0
SEGMENT_BYTES = 1024 * 1024
CHUNK_BYTES = 256 * 1024
_NAME = re.compile(r"flight-(?:(\d{10})-)?(\d{13})-\d+(\.open)?\.jsonl\.gz")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file; times in Unix seconds. An open one may end in the middle of a line."""

    path: Path
    number: int  # 0: of an earlier version
    start_ts: float
    end_ts: float  # of the last write
    open: bool
    num_bytes: int


class Segments:
    """The segments in one directory."""

    def __init__(
        self, directory: Path, *, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S
    ) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s

    def new_path(self) -> Path:
        """The name of a segment that begins now; makes the directory (0700)."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = 1 + max((segment.number for segment in self.listed()), default=0)
        start = f"{time.time() * 1000:013.0f}"
        return self.directory / f"flight-{number:010}-{start}-{os.getpid()}.open.jsonl.gz"

    def finish(self, path: Path) -> None:
        """Rename a completed segment."""
        path.rename(path.with_name(path.name.replace(".open.", ".")))

    def listed(self) -> list[Segment]:
        """All segments in the order they were written."""
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
                                number=int(match[1] or 0),
                                start_ts=int(match[2]) / 1000,
                                end_ts=stat.st_mtime,
                                open=bool(match[3]),
                                num_bytes=stat.st_size,
                            )
                        )
        return _corrected(sorted(found, key=lambda segment: (segment.number, segment.start_ts)))

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


class SegmentWriter(RecordingWriter):
    """A recording in segments: a key frame begins the next one."""

    def __init__(
        self, segments: Segments, segment_s: float, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Opens the first segment; raises OSError, RecordingError."""
        self._segments = segments
        segments.prune(SEGMENT_BYTES)
        super().__init__(
            segments.new_path(),
            source=FLIGHT_RECORDER,
            private=True,
            keyframe_s=segment_s,
            keyframe_bytes=segment_bytes,
        )

    def begin_member(self) -> None:
        """Begin a segment, unless the open one has only its header; raises as `__init__` does."""
        if self.num_lines > 1:
            self.close()
            self._segments.prune(SEGMENT_BYTES)
            self._open(self._segments.new_path())

    def close(self) -> None:
        """Complete the open segment; raises OSError, RecordingError."""
        if self.is_open:
            super().close()
            self._segments.finish(self.path)


def _corrected(segments: list[Segment]) -> list[Segment]:
    """`segments`, earlier by as much as their clock was ahead of the next segment's clock."""
    corrected: list[Segment] = []
    ahead_s, next_ts = 0.0, time.time()
    for segment in reversed(segments):
        ahead_s = max(ahead_s, segment.end_ts - next_ts)
        next_ts = segment.start_ts - ahead_s
        corrected.append(replace(segment, start_ts=next_ts, end_ts=segment.end_ts - ahead_s))
    return corrected[::-1]


def chunks(segment: Segment) -> Iterator[bytes]:
    """The segment as complete gzip members; nothing if it has been deleted."""
    if segment.open:
        with contextlib.suppress(RecordingError), RecordingReader(segment.path) as reader:
            lines = [line + b"\n" for _, line in iter(reader.raw, None)]
            yield gzip.compress(b"".join(lines), 1)
            if reader.damage is not None:
                logger.warning("vtoken: the flight recording is damaged: %s", reader.damage)
        return
    with contextlib.suppress(FileNotFoundError), segment.path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield data
