"""What a round is worth: the estimate beside its definition, beside a count of what is packed, and
the prices that make µs of it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.planning.worth import (
    MAX_STEPS,
    Estimate,
    RequestColumns,
    Worth,
    estimate_round,
)
from vtoken.runtime.prices import MIN_SAMPLES, WINDOW, Prices

S = 4
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 40),  # live
        st.integers(0, 60),  # extent
        st.integers(1, 20),  # blocks
        st.integers(0, 10),  # full blocks
        st.integers(1, 400),  # steps until the next eviction
    ).filter(lambda r: r[3] * S <= r[0] and r[3] < r[2]),
    max_size=6,
)


def columns(requests: list[tuple[int, ...]]) -> RequestColumns:
    table = np.array(requests, dtype=np.int64).reshape(-1, 5)
    return RequestColumns(*(np.ascontiguousarray(column) for column in table.T))


def in_numpy(c: RequestColumns, *, recycles: bool, fills_holes: bool) -> Estimate:
    """The same equations over whole columns."""
    holes, loose = c.extent - c.num_live, c.num_live - S * c.num_full
    excess = c.num_blocks - (c.num_live // S + 1)
    looked_at = (holes > 0) & (excess > 0) & (loose > 0)
    holes, loose, excess = holes[looked_at], loose[looked_at], excess[looked_at]
    steps = np.minimum(c.due_in[looked_at], MAX_STEPS)
    packed = (loose * steps).astype(float)
    if recycles:
        steps = np.minimum(steps, holes)
        packed = loose * (steps - steps * (steps + 1) / (2 * holes))
    moved = loose
    if fills_holes:
        with_room = (c.num_blocks - c.num_full)[looked_at]
        moved = np.minimum(np.minimum(loose, holes), -(-excess * loose // with_room))
    return Estimate(float(packed.sum()), int(loose.sum()), int(moved.sum()), len(holes))


@given(requests=REQUESTS, recycles=st.booleans(), fills_holes=st.booleans())
def test_the_kernel_is_the_equations(
    requests: list[tuple[int, ...]], recycles: bool, fills_holes: bool
) -> None:
    c = columns(requests)
    found = estimate_round(c, S, recycles=recycles, fills_holes=fills_holes)
    expected = in_numpy(c, recycles=recycles, fills_holes=fills_holes)
    assert found == pytest.approx(expected)


def packed_until_closed(live: int, blocks: list[int], due_in: int, *, recycles: bool) -> int:
    """Loose tokens, step by step, of a request whose blocks hold `blocks` live tokens; a recycled
    token goes into the first hole before attention reads. What is appended is not counted: it is
    read by attention in any case.
    """
    held, total = list(blocks), 0
    for _ in range(due_in):
        if recycles:
            first = next((b for b, n in enumerate(held) if n < S), None)
            if first is None:
                break
            held[first] += 1
        total += sum(n for n in held if n < S)
    assert sum(blocks) == live
    return total


@pytest.mark.parametrize("due_in", [1, 3, 8, 30])
@pytest.mark.parametrize("recycles", [True, False])
def test_the_estimate_is_what_is_packed_where_each_block_has_one_hole(
    due_in: int, recycles: bool
) -> None:
    live, blocks = 24, [S - 1] * 8
    c = columns([(live, 8 * S - 1, 8, 0, due_in)])
    found = estimate_round(c, S, recycles=recycles, fills_holes=True)
    exact = packed_until_closed(live, blocks, due_in, recycles=recycles)
    assert found.packed_tokens == pytest.approx(exact, rel=0.15, abs=4)
    assert (found.loose_tokens, found.moved_tokens, found.num_requests) == (24, 3, 1)


@pytest.mark.parametrize(
    "request_",
    [(16, 16, 6, 4, 9), (17, 20, 5, 0, 9), (16, 20, 6, 4, 9)],
    ids=["dense", "no block to free", "nothing loose"],
)
def test_a_request_that_gains_nothing_is_not_counted(request_: tuple[int, ...]) -> None:
    found = estimate_round(columns([request_]), S, recycles=True, fills_holes=True)
    assert found == Estimate(0.0, 0, 0, 0)


def test_pack_copies_all_loose_tokens() -> None:
    c = columns([(24, 31, 8, 0, 9)])
    assert estimate_round(c, S, recycles=True, fills_holes=False).moved_tokens == 24


def test_a_round_pays_when_it_saves_more_than_it_costs() -> None:
    assert Worth(2.0, 1.0).pays
    assert not Worth(1.0, 1.0).pays


# ---------------------------------------------------------------- prices


def test_before_holes_were_measured_they_cost_nothing() -> None:
    prices = Prices()
    for _ in range(MIN_SAMPLES - 1):
        prices.holes.add(100, 10)
        prices.copies.add(100, 10)
    assert (prices.hole_us, prices.copy_us, prices.plan_us) == (0, 0, 0)
    prices.holes.add(100, 10)
    assert (prices.hole_us, prices.copy_us) == (10, 10)  # a copy is priced as a hole
    prices.copies.add(40, 10)
    assert (prices.hole_us, prices.copy_us) == (10, 10)  # the median of 10, 10, 4
    assert prices.document()["plan"].source == "prior"
    assert prices.document()["hole"].source == "measured"


def test_one_slow_step_does_not_make_a_price() -> None:
    prices = Prices()
    prices.holes.add(1_000_000, 1)
    for _ in range(MIN_SAMPLES):
        prices.holes.add(20, 10)
    assert prices.hole_us == 2


def test_a_price_follows_the_newest_samples_and_learns_nothing_from_none() -> None:
    prices = Prices()
    for _ in range(WINDOW):
        prices.holes.add(20, 10)
    for _ in range(WINDOW // 2 + 1):
        prices.holes.add(70, 10)
    prices.holes.add(500, 0)
    assert prices.hole_us == 7
    assert prices.holes.count == WINDOW + WINDOW // 2 + 1


def test_a_round_saves_packing_and_costs_copies_and_plans() -> None:
    prices = Prices()
    for _ in range(MIN_SAMPLES):
        prices.holes.add(3, 1)
        prices.copies.add(5, 1)
        prices.plans.add(100, 2)
    worth = prices.worth(Estimate(40.0, 8, 6, 2))
    assert (worth.saving_us, worth.cost_us) == (120, 6 * 5 + 2 * 50)
