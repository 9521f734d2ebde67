"""Time series: bounded memory, exact means, markers; and fixed-width numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import get_character_cell_size

from vtoken_console.feed.series import BIN_S, NUM_BINS, SPANS_S, Marker, Rate, Series
from vtoken_console.style import units
from vtoken_console.style.asciify import asciify
from vtoken_console.widgets.figures.bars import bars, nice_top


def test_column_is_the_mean_of_its_samples() -> None:
    series = Series(("a",))
    for i in range(120):
        series.add(990 + i * 0.25, (float(i // 60),))
    row = series.window(30, 2).row("a")
    assert row[0] == pytest.approx(0, abs=0.05)
    assert row[1] == pytest.approx(1, abs=0.05)


def test_unknown_time_is_nan_not_zero() -> None:
    series = Series(("a",))
    series.add(1000.0, (5.0,))
    row = series.window(60, 60).row("a")
    assert row[-1] == 5
    assert all(math.isnan(v) for v in row[:-1])


def test_unknown_value_leaves_the_known_ones_of_its_sample() -> None:
    series = Series(("a", "b"))
    for i in range(8):
        series.add(1000.0 + i * BIN_S, (3.0, math.nan if i % 2 else 5.0))
    window = series.window(30, 6)
    assert window.row("a")[-1] == 3
    assert window.row("b")[-1] == 5
    assert math.isnan(window.row("b")[0])


def test_a_day_of_samples_keeps_the_newest_window_only() -> None:
    series = Series(("a",))
    for i in range(NUM_BINS * 3):
        series.add(i * BIN_S, (float(i),))
    assert series.span() == SPANS_S[-1]
    assert series.window(SPANS_S[-1], 10).row("a")[-1] > NUM_BINS * 2


def test_marker_is_in_the_column_of_its_time() -> None:
    series = Series(("a",))
    for i in range(60):
        series.add(1000 + i * 0.5, (1.0,))
    marker = Marker(1000 + 15, 7)
    series.mark(marker)
    series.mark(Marker(1000 + 15, 7))
    window = series.window(30, 30)
    assert list(window.markers.values()) == [marker]
    assert abs(next(iter(window.markers)) - 15) <= 1


def test_rate_is_the_slope_and_resets_when_the_counter_decreases() -> None:
    rate = Rate()
    values = [rate.add(i * 0.1, i * 5.0) for i in range(50)]
    assert values[-1] == pytest.approx(50)
    assert rate.add(5.1, 0.0) == 0.0


def test_bars_mark_theta_and_values_above_it() -> None:
    lines = bars([0.1, 0.9], 4, 1.0, theta=[0.5, 0.5])
    assert "─" in "".join(text for text, _ in lines[1])
    tall = [style.bgcolor for text, style in lines[2]]
    assert tall[0] != tall[-1]


@given(st.floats(1e-6, 1e9))
def test_top_of_scale_is_not_below_the_value(value: float) -> None:
    top = nice_top(value)
    assert value * (1 - 1e-6) <= top <= value * 10.1


@given(st.integers(0, 10**12))
def test_short_counts_never_change_width(value: int) -> None:
    assert len(units.short_count(value)) == 5


@given(st.text(max_size=30), st.integers(1, 20))
def test_fit_is_exactly_as_wide_as_requested(text: str, width: int) -> None:
    assert len(units.fit(text, width)) == width


@given(st.text(max_size=50))
def test_asciify_keeps_the_width_and_leaves_only_ascii(text: str) -> None:
    out = asciify(text)
    assert out.isascii()
    widths = (1 if char.isascii() else get_character_cell_size(char) for char in text)
    assert len(out) == sum(widths)
