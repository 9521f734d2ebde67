"""Metrics of an answer, and means with confidence intervals; pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2_000
NGRAM = 4  # tokens, for repetition
TINY = 1e-7  # a probability that float32 cannot distinguish from 0 when added to 1

Top = dict[int, float]  # the likeliest tokens of one position -> their log-probability


def string_match_all(text: str, gold: Sequence[str]) -> float:
    """Share of `gold` found in `text`, case ignored; RULER's metric for one sample."""
    text = text.lower()
    return sum(answer.lower() in text for answer in gold) / len(gold)


def divergence(full: Top, evicted: Top) -> float:
    """A lower bound of KL(full || evicted) of two next-token distributions [nats].

    Tokens in both lists are compared one by one, all others as one bucket.
    """
    shared = full.keys() & evicted.keys()
    cells = [(math.exp(full[token]), math.exp(evicted[token])) for token in shared]
    cells.append((max(1 - sum(p for p, _ in cells), TINY), max(1 - sum(q for _, q in cells), TINY)))
    return max(0.0, sum(p * math.log(p / max(q, TINY)) for p, q in cells if p > 0))


def first(top: Top) -> int:
    """The likeliest token."""
    return max(top, key=lambda token: top[token])


def rouge_l(candidate: Sequence[object], reference: Sequence[object]) -> float:
    """F-measure of the longest common subsequence of words or token ids (ROUGE-L)."""
    if not candidate or not reference:
        return float(list(candidate) == list(reference))
    lengths = [0] * (len(reference) + 1)
    for word in candidate:
        diagonal = 0
        for i, other in enumerate(reference, 1):
            above = lengths[i]
            lengths[i] = diagonal + 1 if word == other else max(above, lengths[i - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(candidate) + len(reference))


def equal_share(candidate: Sequence[int], reference: Sequence[int]) -> float:
    """Share of the positions of the longer sequence at which both have the same token."""
    same = sum(a == b for a, b in zip(candidate, reference, strict=False))
    return same / max(len(candidate), len(reference))


def repetition(tokens: Sequence[int]) -> float:
    """Share of runs of NGRAM tokens that occurred before in `tokens`; 0 for less than two runs."""
    runs = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


@dataclass(frozen=True)
class Mean:
    """A mean over samples and its 95% confidence interval (bootstrap over the samples)."""

    value: float
    low: float
    high: float
    samples: int

    def mapped(self, function: Callable[[float], float]) -> Mean:
        """Apply an increasing `function` to the mean and its interval."""
        return Mean(function(self.value), function(self.low), function(self.high), self.samples)


def mean(values: Sequence[float]) -> Mean:
    """The mean with its interval. Raises ValueError if there is no sample."""
    if not values:
        raise ValueError("no sample to take a mean of")
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), (2.5, 97.5)).tolist()
    return Mean(float(np.mean(values)), low, high, len(values))
