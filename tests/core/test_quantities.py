"""Numbers and times as text: three digits, one unit, no exponent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.base.quantities import time_text

SIZES_MS = {"µs": 1e-3, "ms": 1.0, "s": 1e3}


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (0.0, "0 ms"),
        (0.0002, "0.2 µs"),
        (0.0275, "27.5 µs"),
        (0.99949, "999 µs"),
        (0.9996, "1 ms"),
        (8.43, "8.43 ms"),
        (412.4, "412 ms"),
        (999.6, "1 s"),
        (6101.3, "6.1 s"),
        (17_257.0, "17.3 s"),
        (3.6e6, "3600 s"),
    ],
)
def test_a_time_has_three_digits_and_a_unit_that_fits(ms: float, shown: str) -> None:
    assert time_text(ms) == shown


@given(st.floats(1e-6, 1e7), st.sampled_from([3, 6]))
def test_a_time_as_text_is_the_time(ms: float, digits: int) -> None:
    number, unit = time_text(ms, digits).split()
    assert float(number) * SIZES_MS[unit] == pytest.approx(ms, rel=0.6 * 10 ** (1 - digits))
    assert "e" not in number or ms < 1e-3
    assert float(number) < 1000 or unit == "s"
