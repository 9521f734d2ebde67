"""Runs of set flags."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vtoken.base.arrays import runs_of


@given(st.lists(st.booleans()))
def test_runs_are_the_longest_ranges_of_set_flags(flags: list[bool]) -> None:
    runs = runs_of(np.array(flags, dtype=np.bool_))
    assert [i for start, end in runs for i in range(start, end)] == np.flatnonzero(flags).tolist()
    assert all(start < end for start, end in runs)
    assert all(end < start for (_, end), (start, _) in pairwise(runs))
