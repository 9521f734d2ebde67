"""The position and speed of a replay, and the parsing of moments."""

from __future__ import annotations

import time

import pytest

from vtoken_console.feed.playhead import SPEEDS, Playhead, parse_moment

# Local time of an ordinary day, 23:58:00, so that midnight is in the recording.
FIRST = time.mktime((2026, 3, 4, 23, 58, 0, 0, 0, -1))
LAST = FIRST + 300


def test_playhead_moves_with_its_speed_and_not_while_paused() -> None:
    head = Playhead().moved_to(1000.0, now=5.0)
    assert head.ts(7.0) == 1002.0
    fast = head.faster(2, now=7.0)
    assert (fast.speed, fast.ts(7.0), fast.ts(9.0)) == (4.0, 1002.0, 1010.0)
    paused = fast.with_paused(True, now=9.0)
    assert paused.ts(100.0) == 1010.0
    assert paused.with_paused(False, now=100.0).ts(101.0) == 1014.0


def test_speed_stops_at_both_ends() -> None:
    head = Playhead()
    assert head.faster(99, now=0.0).speed == SPEEDS[-1] == 16.0
    assert head.faster(-99, now=0.0).speed == SPEEDS[0] == 0.25


@pytest.mark.parametrize(
    ("text", "after_s"),
    [
        ("23:58", 0),
        ("23:59:30", 90),
        ("00:01:05", 185),
        ("0:02", 240),
        ("95", 95),
        ("12.5", 12.5),
        ("01:30", 90),
    ],
)
def test_moments_are_wall_clock_positions_or_seconds(text: str, after_s: float) -> None:
    assert parse_moment(text, FIRST, LAST) == FIRST + after_s


@pytest.mark.parametrize("text", ["12:00", "301", "24:01", "23:75", "soon", "", "-3"])
def test_a_moment_outside_is_refused_with_the_bounds(text: str) -> None:
    with pytest.raises(
        ValueError, match="23:58:00 to 00:03:00, 00:00 to 05:00, or 0 to 300 seconds"
    ):
        parse_moment(text, FIRST, LAST)
