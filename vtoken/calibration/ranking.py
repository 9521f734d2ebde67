"""How well signals rank needles, and where in the model they rank them best. Numpy only.

A ranking holds a needle at a share `keep` if every token of its answer is among the `keep` * n
best of the n tokens. Of equal tokens the newer one is better, as in `vtoken.policies.base.lowest`.
Where a place is chosen, each token takes the maximum over RADIUS neighbours a side first: digits in
a row are one number.

1. Layers and heads are chosen on one half of the prompts, recall is reported on the other.
2. A position says nothing: a fixed set of places that holds a share `keep` of a prompt holds a
   needle with probability `keep` at most, for depths are even. That is chance.
3. More layers than one, or fewer heads than all, are chosen only where they are CLEARLY better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from vtoken.arrays import Floats

KEEPS = (0.5, 0.33, 0.25, 0.125, 0.083)
RADIUS = 3
CLEARLY = 0.15  # of the mean recall over KEEPS
EQUAL = 0.02
MAX_LAYERS = 3
CHANCE_KEEP = 0.25
CHANCE_P = 0.001  # how probable a recall at CHANCE_KEEP may be by chance and still count as chance


@dataclass(frozen=True, slots=True)
class Place:
    """Where a signal is taken from; no `heads`: all query heads."""

    layers: tuple[int, ...]
    heads: tuple[int, ...] = ()


@dataclass(slots=True)
class Surveyed:
    """The numbers of one kind of signal for every token of one prompt, without neighbours.

    `layers` [L, n]: over all heads; `heads` [L, H, n]: of each query head alone, None for a signal
    of keys. `answer`: the tokens of the needle's answer.
    """

    layers: Floats
    heads: Floats | None
    answer: list[int]


def worst_rank(scores: Floats, answer: Sequence[int]) -> Floats:
    """The worst rank, 1 = best, of the tokens `answer`, as a share of the n tokens.

    `scores` [..., n], higher = keep; the result is [...].
    """
    num_tokens = scores.shape[-1]
    ids = np.arange(num_tokens)
    ranks = [
        ((scores > (own := scores[..., token, None])) | ((scores == own) & (ids >= token))).sum(-1)
        for token in answer
    ]
    worst: Floats = (np.max(ranks, axis=0) / num_tokens).astype(np.float32)
    return worst


def with_neighbours(scores: Floats) -> Floats:
    """`scores` [..., n], each token's the maximum over RADIUS neighbours a side and itself."""
    edges = [(0, 0)] * (scores.ndim - 1) + [(RADIUS, RADIUS)]
    padded = np.pad(scores, edges, constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * RADIUS + 1, axis=-1)
    found: Floats = windows.max(axis=-1)
    return found


def beats_chance(worst: Floats) -> bool:
    """Whether the worst ranks [samples] show that the ranking knows where needles are."""
    held, samples = int((worst <= CHANCE_KEEP).sum()), len(worst)
    tail = sum(
        comb(samples, k) * CHANCE_KEEP**k * (1 - CHANCE_KEEP) ** (samples - k)
        for k in range(held, samples + 1)
    )
    return tail < CHANCE_P


def choose(surveys: Sequence[Surveyed]) -> Place:
    """Where the signal of `surveys` ranks needles best.

    Of a kind that is not linear (a maximum, a count), several layers or heads are judged by the
    mean of their own numbers, which is not quite the signal over all of them.
    """
    num_layers = len(surveys[0].layers)
    scores = _merits(surveys, lambda survey: survey.layers)
    order = sorted(range(num_layers), key=lambda layer: scores[layer], reverse=True)
    place, best = Place((order[0],)), scores[order[0]][0]
    while len(place.layers) < MAX_LAYERS:
        wider = [(*place.layers, layer) for layer in order[:6] if layer not in place.layers]
        found = [(_merit_of_layers(surveys, layers), layers) for layers in wider]
        merit, layers = max(found, default=(0.0, ()))
        if merit < best + CLEARLY:
            break
        place, best = Place(tuple(sorted(layers))), merit
    few = _few_heads(surveys)
    if few is not None and few[0] >= best + CLEARLY:
        place = few[1]
    return place


def _few_heads(surveys: Sequence[Surveyed]) -> tuple[float, Place] | None:
    """The best set of heads of one layer, and its merit; of about equal ones the largest."""
    if surveys[0].heads is None:
        return None
    num_layers, num_heads, _ = surveys[0].heads.shape
    own = _merits(surveys, _flat_heads)
    found: list[tuple[float, Place]] = []
    for layer in range(num_layers):
        first = layer * num_heads
        order = sorted(range(num_heads), key=lambda head: own[first + head], reverse=True)
        size = 1
        while size < num_heads:
            heads = tuple(sorted(order[:size]))
            found.append((_merit_of_heads(surveys, layer, heads), Place((layer,), heads)))
            size *= 2
    if not found:
        return None
    best = max(merit for merit, _ in found)
    return max(
        (pair for pair in found if pair[0] >= best - EQUAL),
        key=lambda pair: (len(pair[1].heads), pair[0]),
    )


def _flat_heads(survey: Surveyed) -> Floats:
    assert survey.heads is not None
    return survey.heads.reshape(-1, survey.heads.shape[-1])


def _merit_of_layers(surveys: Sequence[Surveyed], layers: tuple[int, ...]) -> float:
    chosen = list(layers)
    return _merits(surveys, lambda survey: survey.layers[chosen].mean(axis=0, keepdims=True))[0][0]


def _merit_of_heads(surveys: Sequence[Surveyed], layer: int, heads: tuple[int, ...]) -> float:
    chosen = list(heads)

    def mean(survey: Surveyed) -> Floats:
        assert survey.heads is not None
        found: Floats = survey.heads[layer, chosen].mean(axis=0, keepdims=True)
        return found

    return _merits(surveys, mean)[0][0]


def _merits(
    surveys: Sequence[Surveyed], of: Callable[[Surveyed], Floats]
) -> list[tuple[float, float]]:
    """Of each ranking [k, n] that `of` names: mean recall over KEEPS; then, to tell equal ones
    apart, how far from the last place its needles are.
    """
    worst = np.stack([worst_rank(with_neighbours(of(survey)), survey.answer) for survey in surveys])
    recall = np.mean([(worst <= keep).mean(axis=0) for keep in KEEPS], axis=0)
    return list(zip(recall.tolist(), (-np.log(worst).mean(axis=0)).tolist(), strict=True))
