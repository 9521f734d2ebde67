"""The step time is the usual one, from the first steps on, without idle time and pauses."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from vtoken.control.step_times import NUM_STEPS, StepTimes


def test_the_first_steps_give_their_own_time() -> None:
    times = StepTimes()
    assert times.median_ms == 0
    for now in (100.0, 102.0, 108.0, 111.0):
        times.ended(now, idle=False)
    assert times.median_ms == 3_000


def test_one_long_prompt_does_not_change_the_time_of_the_others() -> None:
    times, now = StepTimes(), 0.0
    for step in range(20):
        now += 6.0 if step == 10 else 0.025
        times.ended(now, idle=False)
    assert round(times.median_ms, 6) == 25


def test_idle_time_and_pauses_are_no_step() -> None:
    times = StepTimes()
    times.ended(1.0, idle=False)
    times.ended(1.02, idle=True)
    times.ended(500.0, idle=False)
    times.leave_out()
    times.ended(900.0, idle=False)
    assert round(times.median_ms, 6) == 20


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=3 * NUM_STEPS))
def test_it_is_the_median_of_the_newest(took_s: list[int]) -> None:
    times, now = StepTimes(), 0.0
    times.ended(now, idle=False)
    for seconds in took_s:
        now += seconds
        times.ended(now, idle=False)
    assert times.median_ms == 1e3 * statistics.median(took_s[-NUM_STEPS:])
