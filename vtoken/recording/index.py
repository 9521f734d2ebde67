"""The index of a recording: where to start reading from for any moment, and what happened when.

Knows the wire and the reader. Made by one pass over the file that decodes no block and no request.
Times are Unix seconds of the server that never go back: after a jump of its clock to the past,
time stands still until it has caught up.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from vtoken import wire
from vtoken.recording.errors import RecordingError
from vtoken.recording.lines import Place
from vtoken.recording.reader import RecordingReader

MARKED: frozenset[wire.EventKind] = frozenset({"config", "violation"})
MAX_MARKS = 10_000
TURN_LINES = 256  # lines between two turns of the caller


@dataclass(frozen=True, slots=True)
class Keyframe:
    """A `hello` with its `snapshot` behind it; `place` is that of the hello."""

    ts: float
    place: Place


@dataclass(frozen=True, slots=True)
class Mark:
    """Something to be seen on the time axis."""

    ts: float
    kind: wire.EventKind
    text: str


@dataclass(slots=True)
class Index:
    """Grows while `scan` runs; `complete` once the end was reached."""

    keyframes: list[Keyframe] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    first_ts: float = 0.0
    last_ts: float = 0.0
    num_lines: int = 0
    complete: bool = False
    torn: str = ""
    error: RecordingError | None = None  # reading ended here

    @property
    def duration_s(self) -> float:
        return self.last_ts - self.first_ts

    def before(self, ts: float) -> Keyframe | None:
        """The last key frame at `ts` or earlier, else the first; None without any."""
        if not self.keyframes:
            return None
        at = bisect.bisect_right(self.keyframes, ts, key=lambda frame: frame.ts)
        return self.keyframes[max(0, at - 1)]


class _Peek(msgspec.Struct):
    type: str
    ts: float = 0.0
    event: wire.Event | None = None


def scan(reader: RecordingReader, index: Index) -> Iterator[Index]:
    """Fill `index` from the start of the file, yielding it every few lines and at the end.

    A damaged line ends it, with `error` set; what lies before stays usable.
    """
    decoder = msgspec.json.Decoder(_Peek)
    reader.rewind()
    hello: tuple[float, Place] | None = None
    try:
        while (found := reader.raw()) is not None:
            place, line = found
            index.num_lines += 1
            try:
                peek = decoder.decode(line)
            except msgspec.MsgspecError as error:
                reason = f"not a recording: {error}"
                raise RecordingError(reader.path, reason, place.number) from error
            if peek.type in ("recording", "audit"):
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
            if index.num_lines % TURN_LINES == 0:
                yield index
    except RecordingError as error:
        index.error = error
    index.torn = reader.torn
    index.complete = True
    yield index
