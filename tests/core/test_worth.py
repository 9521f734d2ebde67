"""The worth of a round: the estimate against its definition and against a count of packed tokens,
and the prices that convert it to µs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.planning.worth import (
    MAX_STEPS,
    Estimate,
    RequestColumns,
    Worth,
    estimate_round,
)
from vtoken.core.runtime.prices import MIN_SAMPLES, WINDOW, Prices

S = 4  # slots of a block
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 40),  # live
        st.integers(0, 60),  # extent
        st.integers(1, 20),  # blocks
        st.integers(0, 10),  # full blocks
        st.integers(1, 400),  # steps until the next eviction
        st.integers(0, 40),  # tokens that die in it
    ).filter(lambda r: r[3] * S <= r[0] and r[3] < r[2]),
    max_size=6,
)


def columns(requests: list[tuple[int, ...]]) -> RequestColumns:
    table = np.array(requests, dtype=np.int64).reshape(-1, 6)
    return RequestColumns(*(np.ascontiguousarray(column) for column in table.T))


def in_numpy(c: RequestColumns, *, recycles: bool, fills_holes: bool) -> Estimate:
    """The same equations over entire columns."""
    holes, partial = c.extent - c.num_live, c.num_live - S * c.num_full
    excess = c.num_blocks - (c.num_live // S + 1)
    looked_at = (holes > 0) & (excess > 0) & (partial > 0)
    holes, partial, excess = holes[looked_at], partial[looked_at], excess[looked_at]
    blocks = c.num_blocks[looked_at]
    steps = np.minimum(c.due_in[looked_at], MAX_STEPS)
    covered = np.minimum(1.0, c.dying[looked_at] / blocks)
    packed, left, lasting = (partial * steps).astype(float), blocks, partial * (1 - covered)
    if recycles:
        steps = np.minimum(steps, holes)
        packed = partial * (steps - steps * (steps + 1) / (2 * holes))
        left, lasting = holes - steps, partial * (holes - steps) / holes * (1 - covered / 2)
    packed += lasting * np.minimum(left, MAX_STEPS - steps)
    moved = partial
    if fills_holes:
        with_room = blocks - c.num_full[looked_at]
        moved = np.minimum(np.minimum(partial, holes), -(-excess * partial // with_room))
    return Estimate(float(packed.sum()), int(partial.sum()), int(moved.sum()), len(holes))


@given(requests=REQUESTS, recycles=st.booleans(), fills_holes=st.booleans())
def test_the_kernel_is_the_equations(
    requests: list[tuple[int, ...]], recycles: bool, fills_holes: bool
) -> None:
    c = columns(requests)
    found = estimate_round(c, S, recycles=recycles, fills_holes=fills_holes)
    expected = in_numpy(c, recycles=recycles, fills_holes=fills_holes)
    assert found == pytest.approx(expected)


def packed(blocks: list[int], size: int, dying: int, seed: int, *, recycles: bool) -> int:
    """Tokens of partial blocks, summed over `MAX_STEPS` steps of attention. The request's blocks of
    `size` slots hold `blocks` live tokens.

    It decodes one token per step, into its first hole or behind its last token. Every `dying` steps
    as many random tokens die. All-dead blocks are dropped.
    """
    rng = np.random.default_rng(seed)
    held = list(blocks)
    written = [size] * (len(held) - 1) + held[-1:]
    total = 0
    for step in range(MAX_STEPS):
        if dying and step and step % dying == 0:
            for _ in range(dying):
                held[rng.choice(len(held), p=np.array(held) / sum(held))] -= 1
        stays = [b for b, n in enumerate(held) if n]
        held, written = [held[b] for b in stays], [written[b] for b in stays]
        holes = [b for b, n in enumerate(held) if n < written[b]]
        if recycles and holes:
            held[holes[0]] += 1
        else:
            if written[-1] == size:
                held.append(0)
                written.append(0)
            held[-1] += 1
            written[-1] += 1
        if held != written:
            total += sum(n for n in held if n < size)
    return total


@pytest.mark.parametrize("recycles", [True, False])
@pytest.mark.parametrize("dying", [0, 1, 4, 33])
@pytest.mark.parametrize(("size", "num_blocks", "holes"), [(32, 13, 33), (8, 8, 10), (32, 13, 60)])
def test_the_estimate_is_near_what_a_round_spares_the_request_of_packing(
    size: int, num_blocks: int, holes: int, dying: int, recycles: bool
) -> None:
    """Random victims. Beside it the same request, dense, with one block fewer or two."""
    spared = estimated = 0.0
    for seed in range(6):
        dead = np.random.default_rng(seed).choice(num_blocks * size, holes, replace=False)
        blocks = [size - n for n in np.bincount(dead // size, minlength=num_blocks).tolist()]
        live = sum(blocks)
        dense = [size] * (live // size) + ([live % size] if live % size else [])
        row = (live, num_blocks * size, num_blocks, blocks.count(size), dying or MAX_STEPS, dying)
        spared += packed(blocks, size, dying, seed, recycles=recycles)
        spared -= packed(dense, size, dying, seed, recycles=recycles)
        found = estimate_round(columns([row]), size, recycles=recycles, fills_holes=True)
        assert found.num_requests == 1
        estimated += found.packed_tokens
    assert spared / 3 < estimated < spared * 1.5


@pytest.mark.parametrize(
    "request_",
    [(16, 16, 6, 4, 9, 1), (17, 20, 5, 0, 9, 1), (16, 20, 6, 4, 9, 1)],
    ids=["dense", "no block to free", "nothing partial"],
)
def test_a_request_that_gains_nothing_is_not_counted(request_: tuple[int, ...]) -> None:
    found = estimate_round(columns([request_]), S, recycles=True, fills_holes=True)
    assert found == Estimate(0.0, 0, 0, 0)


def test_pack_copies_all_tokens_of_partial_blocks() -> None:
    c = columns([(24, 31, 8, 0, 9, 1)])
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


@pytest.mark.parametrize(
    ("name", "samples", "per", "prior_us"),
    [
        ("probe", "probes", "request", 0),
        ("park", "parks", "token", 7),  # the price of a copy
        ("restore", "restores", "token", 7),
    ],
)
def test_a_probe_and_copies_to_the_host_have_prices_once_they_were_measured(
    name: str, samples: str, per: str, prior_us: float
) -> None:
    prices = Prices()
    for _ in range(MIN_SAMPLES):
        prices.copies.add(21, 3)
    price = prices.document()[name]
    assert (price.us, price.per, price.source) == (prior_us, per, "prior")
    for _ in range(MIN_SAMPLES):
        getattr(prices, samples).add(90, 3)
    price = prices.document()[name]
    assert (price.us, price.per, price.source) == (30, per, "measured")


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
