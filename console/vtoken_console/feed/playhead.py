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
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
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
    """The Unix time of `text`: local wall-clock HH:MM[:SS], a position [H:]MM:SS, or seconds from
    the start. What is both is a time of day.

    Raises ValueError with the bounds if the moment is not in the recording.
    """
    text = text.strip()
    found: list[float] = []
    if _CLOCK.fullmatch(text):
        parts = [int(part) for part in text.split(":")]
        found = _of_day(parts, first_ts)
        position = sum(part * 60**power for power, part in enumerate(reversed(parts)))
        found.append(first_ts + position)
    elif _SECONDS.fullmatch(text):
        found = [first_ts + float(text)]
    for ts in found:
        if ts <= last_ts:
            return max(ts, first_ts)
    length = last_ts - first_ts
    raise ValueError(
        f"{text!r} is not a moment of this recording: {clock(first_ts)} to {clock(last_ts)}, "
        f"00:00 to {length // 60:02.0f}:{length % 60:02.0f}, or 0 to {length:.0f} seconds"
    )


def _of_day(parts: list[int], first_ts: float) -> list[float]:
    """The first time after `first_ts` at which a clock shows hours, minutes and seconds."""
    hours, minutes, seconds = [*parts, 0][:3]
    if not (hours < 24 and minutes < 60 and seconds < 60):
        return []
    day = list(time.localtime(first_ts))
    day[3:6] = hours, minutes, seconds
    day[8] = -1  # the library determines summer time
    ts = time.mktime(tuple(day))  # type: ignore[arg-type]
    while ts < int(first_ts):
        ts += DAY_S
    return [ts]


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
