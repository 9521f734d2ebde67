"""Signals and policies against published scorers: the file that tests/golden/make.py made.

The scorers rank heads apart; their mean over KV heads is what one keep-set for all heads ranks by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vtoken.policies import View, make_policy
from vtoken.policies.signals import make_keeper
from vtoken.vllm.worker.probe import key_values

GOLDEN = np.load(Path(__file__).parent / "golden" / "kvpress.npz")
NUM_TOKENS, WINDOW = 48, 12
PARAMS: dict[str, dict[str, Any]] = {
    "streaming_llm": {},
    "h2o": {"normalize": True, "recent_ratio": 0.0, "sinks": 0},
    "tova": {},
    "snapkv": {"window": WINDOW, "pool_radius": 2},
    "knorm": {},
    "keydiff": {},
}
PLAIN = ["tova", "knorm", "keydiff"]  # the scorer's number is the signal itself


def signal_of(name: str) -> Any:
    """The policy's signal [n], as worker and probe compute it from the golden keys or rows."""
    signal = make_policy(name, PARAMS[name]).reads
    if signal is None:
        return np.empty(0, dtype=np.float32)
    if signal.source == "keys":
        keys = torch.from_numpy(GOLDEN["keys"]).transpose(0, 1)[None]  # one block of n slots
        return key_values(signal, torch.arange(NUM_TOKENS), [keys]).numpy()
    keeper = make_keeper(signal, (0,))
    rows = GOLDEN["attention"].mean(axis=0)
    for start, stop in ((0, 20), (20, 47), (47, 48)):  # two chunks and a decode step
        part = rows[start:stop, :stop][-signal.num_rows(stop - start) :]
        if signal.kind == "attention_sum":
            part = part.sum(axis=0, keepdims=True)
        keeper.add(np.arange(stop), part, stop - start)
    return keeper.scores()


CASES = [("streaming_llm", 24)]  # its scorer marks the half that goes
CASES += [(name, budget) for name in PARAMS if name != "streaming_llm" for budget in (16, 24, 36)]


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_victims_are_those_of_the_published_scorer(name: str, budget: int) -> None:
    scores = GOLDEN[name]
    scores[-1] = np.inf  # the newest token is never a victim
    expected = np.argsort(scores, kind="stable")[: NUM_TOKENS - budget]
    view = View(np.arange(NUM_TOKENS), NUM_TOKENS, NUM_TOKENS - 1, budget, scores=signal_of(name))
    victims = make_policy(name, PARAMS[name]).select_victims(view)
    assert set(victims.tolist()) == set(expected.tolist())


@pytest.mark.parametrize("name", PLAIN)
def test_signal_is_the_published_score(name: str) -> None:
    expected = GOLDEN[name]
    known = slice(None, -1) if name == "tova" else slice(None)  # it lifts the newest token's
    np.testing.assert_allclose(signal_of(name)[known], expected[known], rtol=1e-5, atol=1e-6)


def test_policies_differ_on_the_golden_cache() -> None:
    """The comparison bites: no scorer stands in for another."""
    lowest = {name: tuple(np.sort(np.argsort(GOLDEN[name])[:24])) for name in PARAMS}
    assert len(set(lowest.values())) == len(PARAMS)
