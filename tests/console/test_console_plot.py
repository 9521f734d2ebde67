"""Curves of braille dots, their axes, and how charts share a panel."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.style import Style

from vtoken_console.export.dots import with_dots
from vtoken_console.style import palette
from vtoken_console.widgets.figures.charts import MIN_HEIGHT, MIN_WIDTH, arrange
from vtoken_console.widgets.figures.plot import bridged, dots, plot, time_axis
from vtoken_console.widgets.lines import Line

BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def lit(bits: np.ndarray) -> set[tuple[int, int]]:
    """(column, row from below) of every dot."""
    height, width = bits.shape
    return {
        (2 * x + dx, 4 * (height - y) - 1 - dy)
        for y, x, dy, dx in itertools.product(range(height), range(width), range(4), range(2))
        if bits[y, x] & BITS[dy][dx]
    }


def cells(line: Line) -> list[tuple[str, Style]]:
    return [(char, style) for text, style in line for char in text]


heights = st.integers(1, 6)
shares = st.lists(st.one_of(st.floats(0, 1), st.just(np.nan)), min_size=2, max_size=24)


@given(shares, heights)
def test_curve_passes_its_values_and_joins_neighbours_without_a_hole(
    values: list[float], height: int
) -> None:
    array = np.array(values[: len(values) // 2 * 2])
    found = lit(dots(array, height, 1.0))
    rows = [{y for x, y in found if x == column} for column in range(len(array))]
    for value, own in zip(array, rows, strict=True):
        assert (own == set()) == bool(np.isnan(value))
        if own:
            assert int(np.rint(value * (4 * height - 1))) in own
            assert own == set(range(min(own), max(own) + 1))
    for own, following in itertools.pairwise(rows):
        if own and following:
            assert min(abs(a - b) for a in own for b in following) <= 1


def test_short_gap_is_bridged_by_a_straight_line_and_a_long_one_stays() -> None:
    nan = np.nan
    values = np.array([nan, 1, nan, nan, 4, nan, nan, nan, 8, nan])
    assert bridged(values, 2).tolist()[1:5] == [1, 2, 3, 4]
    assert np.isnan(bridged(values, 2)[[0, 5, 6, 7, 9]]).all()
    assert bridged(values, 3).tolist()[4:9] == [4, 5, 6, 7, 8]


def test_threshold_is_a_line_and_values_above_it_have_the_warning_colour() -> None:
    values = np.array([0.1] * 4 + [np.nan] * 2 + [0.9] * 4)
    lines = plot(values, 4, 1.0, theta=np.full(10, 0.5))
    at, top, bottom = cells(lines[1]), cells(lines[0]), cells(lines[3])
    assert [char for char, _ in at] == ["─"] * 5
    assert {style for char, style in top if char > "\u2800"} == {palette.style(palette.WARN)}
    assert {style for char, style in bottom if char > "\u2800"} == {palette.style(palette.BAR)}


@given(st.sampled_from([30, 60, 120, 300, 900]), st.integers(13, 200))
def test_time_axis_ends_now_and_its_labels_never_touch(span_s: int, width: int) -> None:
    ticks = time_axis(span_s, width)
    unit = "min" if span_s >= 120 else "s"
    assert ticks[0] == (0, f"-{span_s // (60 if unit == 'min' else 1)} {unit}")
    assert ticks[-1] == (width - 1, "now")
    for (x, text), (other, label) in itertools.pairwise(ticks):
        begins = other - (len(label) - 1 if label == "now" else len(label) // 2)
        ends = x + len(text) if x == 0 else x - len(text) // 2 + len(text)
        assert ends < begins
    seconds = [0 if text == "now" else int(text.split()[0]) for _, text in ticks]
    for (x, _), second in zip(ticks, seconds, strict=True):
        whole = span_s if unit == "s" else span_s // 60
        assert abs(x / width - (1 + second / whole)) <= 1.01 / width


@given(st.integers(20, 250), st.integers(5, 60))
def test_charts_fit_their_panel(width: int, height: int) -> None:
    rows, columns = arrange(5, width, height)
    assert columns == 1 or width // columns >= MIN_WIDTH
    assert rows == 1 or height // rows >= MIN_HEIGHT


@pytest.mark.parametrize(
    ("size", "shape"),
    [((130, 12), (1, 5)), ((118, 29), (2, 3)), ((78, 16), (2, 3)), ((66, 7), (1, 3))],
)
def test_charts_have_the_shape_of_charts(size: tuple[int, int], shape: tuple[int, int]) -> None:
    assert arrange(5, *size) == shape


def test_exported_dots_need_no_font() -> None:
    text = (
        '<text class="t-r1" x="24.4" y="44.4" textLength="36.6" clip-path="url(#l)">a\u2801b</text>'
    )
    out = with_dots(text)
    assert not re.search("[\u2801-\u28ff]", out)
    assert ">a\N{NO-BREAK SPACE}b</text>" in out
    (path,) = re.findall(r'<path class="t-r1" d="M([\d.]+) ([\d.]+)h[^"]*"', out)
    assert 36.6 < float(path[0]) < 36.6 + 12.2 / 2
    assert 44.4 - 20 < float(path[1]) < 44.4 - 20 + 24.4 / 4
    assert with_dots(text.replace("\u2801", "c")) == text.replace("\u2801", "c")
