"""The position and speed of a replay.

Times named `ts` are Unix seconds of the recording; `now` is monotonic.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

from vtoken.sentences import clock

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
DAY_S = 24 * 3600
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_SECONDS = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Playhead:
    """The position was `at_ts` at monotonic time `since`."""

    at_ts: float = 0.0
    since: float = 0.0
    speed: float = 1.0
    paused: bool = False

    def ts(self, now: float) -> float:
        return self.at_ts if self.paused else self.at_ts + (now - self.since) * self.speed

    def moved_to(self, ts: float, now: float) -> Playhead:
        return replace(self, at_ts=ts, since=now)

    def with_paused(self, paused: bool, now: float) -> Playhead:
        return replace(self, at_ts=self.ts(now), since=now, paused=paused)

    def faster(self, steps: int, now: float) -> Playhead:
        """Moves `steps` up in SPEEDS, or down if negative, clamped to the ends."""
        index = max(0, min(len(SPEEDS) - 1, SPEEDS.index(self.speed) + steps))
        return replace(self, at_ts=self.ts(now), since=now, speed=SPEEDS[index])


def parse_moment(text: str, first_ts: float, last_ts: float) -> float:
    """The Unix time of `text`: local wall-clock HH:MM[:SS], or seconds from the start.

    Raises ValueError with the bounds if the moment is not in the recording.
    """
    text = text.strip()
    if match := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        if hours < 24 and minutes < 60 and seconds < 60:
            day = list(time.localtime(first_ts))
            day[3:6] = hours, minutes, seconds
            day[8] = -1  # the library determines summer time
            ts = time.mktime(tuple(day))  # type: ignore[arg-type]
            while ts < int(first_ts):
                ts += DAY_S
            if ts <= last_ts:
                return max(ts, first_ts)
    elif _SECONDS.fullmatch(text) and (ts := first_ts + float(text)) <= last_ts:
        return ts
    raise ValueError(
        f"{text!r} is not a moment of this recording: {clock(first_ts)} to "
        f"{clock(last_ts)}, or 0 to {last_ts - first_ts:.0f} seconds"
    )


@dataclass(frozen=True, slots=True)
class ReplayStatus:
    """Position and state of a replay. `marks`: (ts, kind, text). `indexed`: the end is known."""

    name: str
    ts: float
    first_ts: float
    last_ts: float
    speed: float
    paused: bool
    at_end: bool
    indexed: bool
    marks: tuple[tuple[float, str, str], ...] = ()
    note: str = ""
