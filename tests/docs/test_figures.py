"""Marked figures are the measured ones, and on the covered pages every figure is marked."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.figures import (
    COVERED,
    PAGES,
    ROOT,
    filled_in,
    names,
    shown,
    sources,
    unmarked,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_marked_figure_is_the_measured_one(page: Path) -> None:
    text = page.read_text()
    assert text == filled_in(text), "run make tables"


@pytest.mark.parametrize("page", COVERED)
def test_a_measurement_in_prose_has_a_marker(page: str) -> None:
    assert unmarked((ROOT / page).read_text()) == []


def test_every_figure_is_on_a_page() -> None:
    on_pages = set(chain.from_iterable(names(page.read_text()) for page in PAGES))
    assert {*sources()["figures"]} == on_pages


def test_every_condition_is_on_a_covered_page() -> None:
    text = "".join((ROOT / page).read_text() for page in COVERED)
    assert not [phrase for phrase in sources()["conditions"] if not re.search(phrase, text)]


def test_a_wrong_figure_is_corrected_and_an_unknown_one_refused() -> None:
    right = f"{shown('floor-half')}<!--=floor-half--> times"
    assert filled_in("?<!--=floor-half--> times") == right
    assert filled_in("9.99<!--=floor-half--> times") == right
    with pytest.raises(KeyError, match="nothing-such"):
        filled_in("1<!--=nothing-such-->")


@pytest.mark.parametrize(
    "text",
    [
        "serves 1.5 times native's", "2x", "finds 73% of", "97 of 128 facts", "+8 points",
        "1.1 [1.05 .. 1.24]", "takes 1,234 tokens a second", "a step takes 3 ms", "| a | 73% |\n",
        "| a | 1.5 |\n",
    ],
)  # fmt: skip
def test_a_measurement_without_a_marker_is_named(text: str) -> None:
    assert unmarked(text)


@pytest.mark.parametrize(
    "text",
    [
        "serves 1.5<!--=floor-half--> times", "73<!--=floor-half-->% of", "`1.5 times`",
        "for 70, 45 and 25% of what they ask for", "the 0.3 release", "eight repeats of 18",
        "| memory | 45% |\n|---|---|\n",
    ],
)  # fmt: skip
def test_conditions_code_and_generated_tables_need_no_marker(text: str) -> None:
    assert unmarked(text) == []
