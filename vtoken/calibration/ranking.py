"""How well signals rank needles, and at which layers and heads they rank them best.

A ranking *holds* a needle at a share `keep` if every token of its answer is among the `keep` * n
best of the n tokens. Of tokens with equal scores the newer is better, as in
`vtoken.policies.lowest`. To choose layers and heads, each token first takes the maximum over
RADIUS neighbours a side, since consecutive digits are one number.

1. Layers and heads are chosen on one half of the prompts; recall is reported on the other.
2. Chance: any fixed set of positions with a share `keep` of a prompt contains a needle with
   probability `keep` at most, since the needles' depths are evenly spaced.
3. More than one layer, or fewer heads than all, are chosen only if recall gains at least MIN_GAIN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from vtoken.base.arrays import Floats

KEEPS = (0.5, 0.33, 0.25, 0.125, 0.083)
RADIUS = 3
MIN_GAIN = 0.15  # of the mean recall over KEEPS
TIE_MARGIN = 0.02
MAX_LAYERS = 3
CHANCE_KEEP = 0.25
CHANCE_P = 0.001  # significance level of a recall at CHANCE_KEEP against chance


@dataclass(frozen=True, slots=True)
class Selection:
    """The layers and query heads of a signal; heads (): all."""

    layers: tuple[int, ...]
    heads: tuple[int, ...] = ()


@dataclass(slots=True)
class Surveyed:
    """The numbers of one kind of signal for every token of one prompt, before pooling.

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
    """`scores` [..., n], each replaced by the maximum over itself and RADIUS neighbours a side."""
    edges = [(0, 0)] * (scores.ndim - 1) + [(RADIUS, RADIUS)]
    padded = np.pad(scores, edges, constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * RADIUS + 1, axis=-1)
    found: Floats = windows.max(axis=-1)
    return found


def beats_chance(worst: Floats) -> bool:
    """Whether a ranking with these worst ranks [samples] is significantly better than chance."""
    held, samples = int((worst <= CHANCE_KEEP).sum()), len(worst)
    tail = sum(
        comb(samples, k) * CHANCE_KEEP**k * (1 - CHANCE_KEEP) ** (samples - k)
        for k in range(held, samples + 1)
    )
    return tail < CHANCE_P


def choose(surveys: Sequence[Surveyed]) -> Selection:
    """The layers and heads where the signal of `surveys` ranks needles best.

    Several layers or heads are ranked by the mean of their numbers. For a kind that is not linear
    (a maximum, a count) this approximates the signal over all of them.
    """
    num_layers = len(surveys[0].layers)
    scores = _mean_recalls(surveys, lambda survey: survey.layers)
    order = sorted(range(num_layers), key=lambda layer: scores[layer], reverse=True)
    selection, best = Selection((order[0],)), scores[order[0]][0]
    while len(selection.layers) < MAX_LAYERS:
        wider = [(*selection.layers, layer) for layer in order[:6] if layer not in selection.layers]
        found = [(_recall_of_layers(surveys, layers), layers) for layers in wider]
        recall, layers = max(found, default=(0.0, ()))
        if recall < best + MIN_GAIN:
            break
        selection, best = Selection(tuple(sorted(layers))), recall
    few = _few_heads(surveys)
    if few is not None and few[0] >= best + MIN_GAIN:
        selection = few[1]
    return selection


def _few_heads(surveys: Sequence[Surveyed]) -> tuple[float, Selection] | None:
    """The best set of heads of one layer, with its recall; the largest within TIE_MARGIN."""
    if surveys[0].heads is None:
        return None
    num_layers, num_heads, _ = surveys[0].heads.shape
    own = _mean_recalls(surveys, _flat_heads)
    found: list[tuple[float, Selection]] = []
    for layer in range(num_layers):
        first = layer * num_heads
        order = sorted(range(num_heads), key=lambda head: own[first + head], reverse=True)
        size = 1
        while size < num_heads:
            heads = tuple(sorted(order[:size]))
            found.append((_recall_of_heads(surveys, layer, heads), Selection((layer,), heads)))
            size *= 2
    if not found:
        return None
    best = max(recall for recall, _ in found)
    return max(
        (pair for pair in found if pair[0] >= best - TIE_MARGIN),
        key=lambda pair: (len(pair[1].heads), pair[0]),
    )


def _flat_heads(survey: Surveyed) -> Floats:
    assert survey.heads is not None
    return survey.heads.reshape(-1, survey.heads.shape[-1])


def _recall_of_layers(surveys: Sequence[Surveyed], layers: tuple[int, ...]) -> float:
    chosen = list(layers)
    return _mean_recalls(surveys, lambda survey: survey.layers[chosen].mean(axis=0, keepdims=True))[
        0
    ][0]


def _recall_of_heads(surveys: Sequence[Surveyed], layer: int, heads: tuple[int, ...]) -> float:
    chosen = list(heads)

    def mean(survey: Surveyed) -> Floats:
        assert survey.heads is not None
        found: Floats = survey.heads[layer, chosen].mean(axis=0, keepdims=True)
        return found

    return _mean_recalls(surveys, mean)[0][0]


def _mean_recalls(
    surveys: Sequence[Surveyed], of: Callable[[Surveyed], Floats]
) -> list[tuple[float, float]]:
    """For each of the rankings [k, n] that `of` returns: its mean recall over KEEPS, and as a tie
    break the mean of -log(worst rank).
    """
    worst = np.stack([worst_rank(with_neighbours(of(survey)), survey.answer) for survey in surveys])
    recall = np.mean([(worst <= keep).mean(axis=0) for keep in KEEPS], axis=0)
    return list(zip(recall.tolist(), (-np.log(worst).mean(axis=0)).tolist(), strict=True))
