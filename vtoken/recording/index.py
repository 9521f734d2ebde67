"""The index of a recording: key frames and marked events, by time.

One pass over the file builds it, without decoding blocks or requests. Times are the server's
Unix seconds made monotonic: after a backward jump of its clock, time stays constant until the clock
has caught up.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from vtoken import wire
from vtoken.base.documents import Decoder
from vtoken.recording.errors import RecordingError
from vtoken.recording.pieces import Place
from vtoken.recording.reader import RecordingReader

MARKED: frozenset[wire.EventKind] = frozenset({"config", "violation"})
MAX_MARKS = 10_000
MESSAGES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(wire.StreamMessage))
YIELD_LINES = 256  # lines that `scan` reads before it yields to the caller


@dataclass(frozen=True, slots=True)
class Keyframe:
    """A `hello` followed by its `snapshot`; `place` is that of the hello."""

    ts: float
    place: Place


@dataclass(frozen=True, slots=True)
class Mark:
    """An event that is marked on the time axis."""

    ts: float
    kind: wire.EventKind
    text: str


@dataclass(slots=True)
class Index:
    """The index; it grows while `scan` runs and is `complete` once the end is reached."""

    keyframes: list[Keyframe] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    first_ts: float = 0.0
    last_ts: float = 0.0
    num_lines: int = 0
    complete: bool = False
    truncated: str = ""
    error: RecordingError | None = None  # damage that was skipped, or why the scan ended

    @property
    def duration_s(self) -> float:
        return self.last_ts - self.first_ts

    def before(self, ts: float) -> Keyframe | None:
        """The last key frame at `ts` or earlier, else the first; None if there are none."""
        if not self.keyframes:
            return None
        at = bisect.bisect_right(self.keyframes, ts, key=lambda frame: frame.ts)
        return self.keyframes[max(0, at - 1)]


class _Peek(msgspec.Struct):
    type: str
    ts: float = 0.0
    event: wire.Event | None = None


_peeks: Decoder[_Peek] = Decoder(_Peek)


def scan(reader: RecordingReader, index: Index) -> Iterator[Index]:
    """Fill `index` from the start of the file, yielding it every `YIELD_LINES` and at the end.

    Damaged lines are skipped, and `error` names them.
    """
    reader.rewind()
    hello: tuple[float, Place] | None = None
    try:
        while (found := reader.raw()) is not None:
            place, line = found
            index.num_lines += 1
            peek = reader.parse(_peeks, place, line)
            if peek is None:
                continue
            if peek.type not in MESSAGES:
                continue
            if not index.first_ts:
                index.first_ts = peek.ts
            index.last_ts = ts = max(index.last_ts, peek.ts)
            if hello is not None and peek.type == "snapshot":
                index.keyframes.append(Keyframe(*hello))
            hello = (ts, place) if peek.type == "hello" else None
            event = peek.event
            if event is not None and event.kind in MARKED and len(index.marks) < MAX_MARKS:
                index.marks.append(Mark(ts, event.kind, event.summary))
            if index.num_lines % YIELD_LINES == 0:
                yield index
        index.error = reader.damage
    except RecordingError as error:
        index.error = error
    index.truncated = reader.truncated
    index.complete = True
    yield index
