"""Signals and policies against published scorers: the files of tests/golden/make.py and
make_rkv.py.

The scorers rank each head separately. Those of kvpress are compared by their mean over KV heads,
which ranks tokens if all heads keep the same ones; R-KV's head by head, selected by `probe.heads`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.mirrors import mirrors_of
from vtoken.core.protocol.step import StepPlan
from vtoken.policies import View, make_policy
from vtoken.policies.signals import Accumulator, Signal, redundancy
from vtoken.vllm.worker.probe import ProbedRequest, folded, key_redundancy, key_values, probe
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import HostScores

GOLDEN = np.load(Path(__file__).parent / "golden" / "kvpress.npz")
RKV = np.load(Path(__file__).parent / "golden" / "rkv.npz")
NUM_TOKENS, WINDOW = 48, 12
PARAMS: dict[str, dict[str, Any]] = {
    "streaming_llm": {},
    "h2o": {"normalize": True, "recent_ratio": 0.0, "sinks": 0, "pool_radius": 0},
    "tova": {"heads": "mean", "pool_radius": 0},
    "snapkv": {"window": WINDOW, "pool_radius": 2},
    "knorm": {"recent": 1, "pool_radius": 0},
    "keydiff": {"recent": 1, "heads": "mean", "pool_radius": 0},
}
R_KV = {"window": 8, "pool": "max", "pool_radius": 3}
PLAIN = ["tova", "knorm", "keydiff"]  # the scorer's number is the signal itself


def signal_of(name: str) -> Any:
    """The policy's signal [n], as worker and probe compute it from the golden keys or rows."""
    reads = make_policy(name, PARAMS[name]).reads
    if reads is None:
        return np.empty(0, dtype=np.float32)
    signal = replace(reads, layers=(0,))
    if signal.source == "keys":
        keys = torch.from_numpy(GOLDEN["keys"]).transpose(0, 1)[None]  # one block of n slots
        return folded(signal, key_values(signal, torch.arange(NUM_TOKENS), {0: keys}, 4)).numpy()
    accumulator = Accumulator(signal)
    rows = GOLDEN["attention"].mean(axis=0)
    for start, stop in ((0, 20), (20, 47), (47, 48)):  # two chunks and a decode step
        part = rows[start:stop, :stop][-signal.num_rows(stop - start) :]
        if signal.kind == "attention_sum":
            part = part.sum(axis=0, keepdims=True)
        accumulator.add(np.arange(stop), part, stop - start)
    return accumulator.scores()


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
    """The comparison can fail: no two scorers agree."""
    lowest = {name: tuple(np.sort(np.argsort(GOLDEN[name])[:24])) for name in PARAMS}
    assert len(set(lowest.values())) == len(PARAMS)


# ---------------------------------------------------------------- R-KV

RKV_KEYS = torch.from_numpy(RKV["keys"]).transpose(0, 1)[None]  # one block of n slots


@pytest.mark.parametrize("head", [0, 1])
def test_redundancy_is_the_published_one(head: int) -> None:
    expected = RKV["redundancy"][head]
    np.testing.assert_allclose(redundancy(RKV["keys"])[head], expected, rtol=1e-5)
    signal = Signal("attention_window", 8, layers=(0,), heads=(head,), mix_lambda=0.1)
    found = key_redundancy(signal, torch.arange(NUM_TOKENS), [RKV_KEYS], 2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("mix_lambda", [0.07, 0.1, 0.5])
@pytest.mark.parametrize("budget", [16, 24, 36])
def test_r_kv_keeps_what_the_published_scorer_keeps(
    budget: int, mix_lambda: float, head: int
) -> None:
    """The prompt in one chunk, through probe, accumulator and report."""
    policy = make_policy("r_kv", R_KV | {"mix_lambda": mix_lambda})
    assert policy.reads is not None
    signal = replace(policy.reads, layers=(0,), heads=(head,))
    scores = HostScores(lambda _: RKV_KEYS, 2)
    mirrors = mirrors_of({"a": np.arange(NUM_TOKENS)})
    mirrors["a"].keep((signal,), scores.make_accumulator)
    probed = ProbedRequest.of([("a", 0, NUM_TOKENS, mirrors["a"])])
    ProbedRequest.read(probed)
    query = torch.zeros(NUM_TOKENS, 2, RKV_KEYS.shape[-1])
    query[-8:] = torch.from_numpy(RKV["queries"]).transpose(0, 1)
    probe(probed, 0, query, RKV_KEYS, scale=query.shape[-1] ** -0.5, soft_cap=0.0)
    plan = StepPlan(0)
    plan.want_scores = (("a", signal),)
    found = scores.finish(probed, plan, mirrors, Ranks())()["a", signal]
    view = View(np.arange(NUM_TOKENS), NUM_TOKENS, NUM_TOKENS, budget, scores=found)
    kept = set(range(NUM_TOKENS)) - set(policy.select_victims(view).tolist())
    assert kept == set(RKV[f"kept_{budget}_{mix_lambda}"][head].tolist())


def test_the_weight_decides_on_the_golden_cache() -> None:
    """The comparison can fail: attention and redundancy both count."""
    assert RKV["kept_24_0.07"].tolist() != RKV["kept_24_0.5"].tolist()
