"""Ranks against a naive count; the choice of layers and heads on constructed rankings."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.base.arrays import Floats
from vtoken.calibration.ranking import (
    RADIUS,
    Selection,
    Surveyed,
    beats_chance,
    choose,
    with_neighbours,
    worst_rank,
)
from vtoken.policies import View, lowest

NUM_LAYERS, NUM_HEADS, NUM_TOKENS = 6, 4, 120
ANSWER = [50, 51, 52]


def naive_worst_rank(scores: list[float], answer: list[int]) -> float:
    best_first = sorted(range(len(scores)), key=lambda token: (scores[token], token), reverse=True)
    return max(best_first.index(token) + 1 for token in answer) / len(scores)


@pytest.mark.parametrize("num_values", [3, 10_000])  # many ties; none
def test_the_worst_rank_is_that_of_a_sorted_list(num_values: int) -> None:
    generator = np.random.default_rng(num_values)
    for _ in range(50):
        scores = generator.integers(num_values, size=(2, 3, 40)).astype(np.float32)
        answer = sorted(generator.choice(40, size=5, replace=False).tolist())
        found = worst_rank(scores, answer)
        for index in np.ndindex(2, 3):
            naive = naive_worst_rank(scores[index].tolist(), answer)
            assert found[index] == pytest.approx(naive)


def test_a_ranking_holds_a_needle_exactly_when_a_policy_keeps_it_complete() -> None:
    generator = np.random.default_rng(0)
    ids = np.arange(60)
    num_complete = 0
    for seed in range(200):
        scores = generator.integers(12, size=60).astype(np.float32)
        scores[-1] = 99  # the newest is never a victim
        budget = int(generator.integers(5, 55))
        view = View(ids, 60, 60, budget, seed)
        victims = lowest(view, scores, 0, 1)
        answer = [20, 21]
        complete = not np.isin(answer, victims).any()
        num_complete += complete
        assert (worst_rank(scores, answer) * 60 <= budget + 1e-4) == complete
    assert 20 < num_complete < 180


def test_each_token_takes_the_maximum_over_its_neighbours() -> None:
    scores = np.zeros((1, 12), dtype=np.float32)
    scores[0, 0], scores[0, 8] = 1, 2
    around = with_neighbours(scores)[0]
    naive = [max(scores[0, max(0, t - RADIUS) : t + RADIUS + 1]) for t in range(12)]
    assert around.tolist() == naive


# ---------------------------------------------------------------- the choice


def surveys(
    layers: dict[int, float], heads: dict[tuple[int, int], float] | None = None, count: int = 24
) -> list[Surveyed]:
    """Random rankings, in which a layer or head raises the answer with the given probability."""
    generator = np.random.default_rng(1)
    found = []
    for _ in range(count):
        of_layers = generator.random((NUM_LAYERS, NUM_TOKENS)).astype(np.float32)
        of_heads = generator.random((NUM_LAYERS, NUM_HEADS, NUM_TOKENS)).astype(np.float32)
        for layer, share in layers.items():
            if generator.random() < share:
                of_layers[layer, ANSWER] += 9
        for head, share in (heads or {}).items():
            if generator.random() < share:
                of_heads[(*head, ANSWER)] += 9
        found.append(Surveyed(of_layers, None if heads is None else of_heads, ANSWER))
    return found


def test_the_best_layer_is_chosen() -> None:
    assert choose(surveys({2: 0.5, 4: 0.9})) == Selection((4,))


def test_all_heads_are_chosen_unless_few_gain_enough() -> None:
    assert choose(surveys({4: 0.95}, {(4, 1): 1.0})) == Selection((4,))


def test_heads_that_gain_enough_are_chosen_alone() -> None:
    found = choose(surveys({4: 0.3}, {(1, 2): 1.0}))
    assert found.layers == (1,)
    assert 2 in found.heads
    assert len(found.heads) < NUM_HEADS


def test_of_equal_sets_of_heads_the_larger_is_chosen() -> None:
    found = choose(surveys({}, {(3, 0): 1.0, (3, 1): 1.0}))
    assert found.layers == (3,)
    assert found.heads == (0, 1)


def test_layers_that_rank_different_needles_are_chosen_together() -> None:
    known = surveys({}, count=24)
    for number, survey in enumerate(known):
        survey.layers[1 if number % 2 else 3, ANSWER] += 9
    assert choose(known) == Selection((1, 3))


def test_a_second_layer_that_ranks_the_same_needles_is_not_chosen() -> None:
    assert len(choose(surveys({1: 1.0, 3: 1.0})).layers) == 1


# ---------------------------------------------------------------- chance


def test_recall_equal_to_the_share_of_kept_tokens_is_chance() -> None:
    generator = np.random.default_rng(2)
    even: Floats = generator.random((400, 24)).astype(np.float32)
    assert sum(beats_chance(worst) for worst in even) <= 3
    assert beats_chance(np.full(24, 0.1, dtype=np.float32))
    assert not beats_chance(np.full(24, 0.9, dtype=np.float32))
    assert not beats_chance(np.full(4, 0.1, dtype=np.float32))  # too few to tell
