"""The quality canary's numbers: computed by hand, and compared with a plain recomputation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.runtime.canary import WINDOW, CanaryTally, Check, make_check


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def check(revision: int = 1, policy: str = "h2o", **fields: Any) -> Check:
    values = {"num_tokens": 10, "num_agreed": 9, "lost": 1.0, "logprob": -5.0} | fields
    return Check(policy, revision, **values)


def test_a_token_agrees_when_no_other_one_is_more_probable() -> None:
    found = make_check(
        "h2o",
        3,
        greedy=True,
        own=floats(-0.5, -1.0, -0.25),
        full=floats(-0.5, -2.0, -0.75),
        first=floats(-0.5, -0.5, -0.75),  # the third one is a tie
    )
    assert (found.num_tokens, found.num_agreed) == (3, 2)
    assert found.lost == pytest.approx(1.5)
    assert found.logprob == pytest.approx(-3.25)


def test_agreement_is_of_greedy_requests_and_logits_are_no_log_probabilities() -> None:
    numbers = {"own": floats(-1.0), "full": floats(-2.0), "first": floats(-1.0)}
    assert make_check("h2o", 1, greedy=False, **numbers).num_agreed is None
    logits = make_check("h2o", 1, greedy=True, are_logprobs=False, **numbers)
    assert (logits.num_agreed, logits.lost, logits.logprob) == (0, None, None)
    unknown = make_check("h2o", 1, greedy=True, **numbers | {"own": None})
    assert (unknown.num_agreed, unknown.lost, unknown.logprob) == (0, None, -2.0)


@pytest.mark.parametrize("name", ["own", "full", "first"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_number_that_is_not_finite_is_no_check(name: str, value: float) -> None:
    numbers = {"own": floats(-1.0), "full": floats(-2.0), "first": floats(-1.0)}
    with pytest.raises(ValueError, match=rf"not finite \({name}\)"):
        make_check("h2o", 1, greedy=True, **numbers | {name: floats(value)})


def test_means_are_over_tokens_and_their_error_is_over_requests() -> None:
    tally = CanaryTally()
    tally.add(check(num_tokens=10, num_agreed=10, lost=0.0), evicted=True)
    one = tally.document()
    assert (one.count, one.agreement, one.agreement_se) == (1, 1.0, None)
    tally.add(check(num_tokens=30, num_agreed=24, lost=6.0), evicted=True)
    two = tally.document()
    assert two.agreement == pytest.approx(34 / 40)
    # By hand: 10 - 8.5 = 1.5 and 24 - 25.5 = -1.5; sqrt(2 / 1 * (2.25 + 2.25)) / 40.
    assert two.agreement_se == pytest.approx(3 / 40)
    assert two.logprob_lost == pytest.approx(6 / 40)
    assert two.logprob == pytest.approx(-10 / 40)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(-5, 5)), min_size=2, max_size=40))
def test_the_error_of_a_mean_is_that_of_numpy(samples: list[tuple[int, float]]) -> None:
    tally = CanaryTally()
    for tokens, lost in samples:
        tally.add(check(num_tokens=tokens, lost=lost), evicted=True)
    n = np.array([tokens for tokens, _ in samples])
    x = np.array([lost for _, lost in samples])
    residuals = x - x.sum() / n.sum() * n
    error = residuals.std(ddof=1) * math.sqrt(len(n)) / n.sum()
    found = tally.document()
    assert found.logprob_lost == pytest.approx(x.sum() / n.sum(), abs=1e-9)
    assert found.logprob_lost_se == pytest.approx(error, abs=1e-9)


def test_groups_are_policy_and_revision_and_the_control_group_is_apart() -> None:
    tally = CanaryTally()
    for revision, policy, agreed in ((1, "h2o", 5), (2, "h2o", 6), (2, "tova", 8), (2, "tova", 10)):
        tally.add(check(revision, policy, num_agreed=agreed), evicted=True)
    tally.add(check(2, "tova", num_agreed=10, lost=0.0), evicted=False)
    found = tally.document()
    assert [(g.revision, g.policy, g.count, g.agreement) for g in found.groups] == [
        (2, "h2o", 1, 0.6),
        (2, "tova", 2, 0.9),
        (1, "h2o", 1, 0.5),
    ]
    assert (found.count, found.checked) == (4, 5)
    assert (found.control.count, found.control.agreement, found.control.logprob_lost) == (1, 1, 0)
    assert tally.document(2).agreement == pytest.approx(0.8)
    assert tally.document(3).count == 0


def test_figures_are_of_the_newest_checks_and_counts_of_all() -> None:
    tally = CanaryTally()
    tally.add(check(num_agreed=0), evicted=True)
    for _ in range(WINDOW):
        tally.add(check(num_agreed=10), evicted=True)
    found = tally.document()
    assert (found.agreement, found.count, found.checked) == (1.0, WINDOW, WINDOW + 1)


def test_what_is_not_checked_is_counted_by_reason() -> None:
    tally = CanaryTally()
    tally.drop(3)
    tally.fail()
    tally.skip("LoRA")
    tally.skip("LoRA")
    found = tally.document()
    assert (found.checked, found.dropped, found.failed) == (0, 3, 1)
    assert found.skipped == {"LoRA": 2}
    assert (found.agreement, found.logprob_lost, found.logprob) == (None, None, None)
