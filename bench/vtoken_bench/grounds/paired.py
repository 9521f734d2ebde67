"""Statistics of paired answers: found or not, by the full cache and under eviction.

share        exact interval of a share (Clopper and Pearson 1934)
difference   score interval of a difference of paired shares (Tango 1998, Stat. Med. 17:891)
McNemar      exact two-sided test that two paired shares are equal
Holm         correction of p values for the number of tests (Holm 1979)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import binomtest, norm

LEVEL = 0.95
MARGIN = 0.05  # a share at most this much below the full cache's is as good


@dataclass(frozen=True)
class Interval:
    """A share or a difference of shares with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """Counts of samples. `gained`: found only under eviction. `lost`: only by the full cache."""

    samples: int
    gained: int
    lost: int

    @classmethod
    def of(cls, evicted: Sequence[bool], full: Sequence[bool]) -> Pairs:
        """Raises ValueError if the two differ in length."""
        both = list(zip(evicted, full, strict=True))
        return cls(len(both), both.count((True, False)), both.count((False, True)))

    def score(self, difference: float) -> float:
        """Tango's statistic: standard normal if the true difference of shares is `difference`."""
        n, b, c = self.samples, self.gained, self.lost
        linear = -b - c + (2 * n - b + c) * difference
        constant = -c * difference * (1 - difference)
        root = math.sqrt(max(linear * linear - 8 * n * constant, 0.0))
        discordant = (root - linear) / (4 * n)  # the share lost, most likely under `difference`
        variance = n * (2 * discordant + difference * (1 - difference))
        distance = b - c - n * difference
        if variance <= 0:
            return 0.0 if distance == 0 else math.copysign(math.inf, distance)
        return distance / math.sqrt(variance)

    def difference(self) -> Interval:
        """The share found under eviction less that of the full cache."""
        found, z, edge = (self.gained - self.lost) / self.samples, norm.ppf((1 + LEVEL) / 2), 1e-9
        low = high = found
        if self.score(-1 + edge) > z:
            low = brentq(lambda d: self.score(d) - z, -1 + edge, found) if found > -1 else -1.0
        if self.score(1 - edge) < -z:
            high = brentq(lambda d: self.score(d) + z, found, 1 - edge) if found < 1 else 1.0
        return Interval(found, low, high)

    def p_equal(self) -> float:
        """McNemar's exact test."""
        discordant = self.gained + self.lost
        if discordant == 0:
            return 1.0
        return float(binomtest(self.lost, discordant, 0.5).pvalue)

    def p_inferior(self) -> float:
        """One-sided p value of "the share is lower than the full cache's by MARGIN or more"."""
        return float(norm.sf(self.score(-MARGIN)))


def share(found: Sequence[bool]) -> Interval:
    """The share of samples found."""
    result = binomtest(sum(found), len(found))
    interval = result.proportion_ci(LEVEL, method="exact")
    return Interval(float(result.statistic), float(interval.low), float(interval.high))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values, corrected for their number, in the same order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, most = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = most
    return corrected


def verdicts(pairs: Sequence[Pairs]) -> list[str]:
    """For each of the settings that are tested together, what 95% certainty allows to say."""
    equal = holm([found.p_equal() for found in pairs])
    inferior = holm([found.p_inferior() for found in pairs])
    words = []
    for found, p_equal, p_inferior in zip(pairs, equal, inferior, strict=True):
        differs, as_good = p_equal <= 1 - LEVEL, p_inferior <= 1 - LEVEL
        if differs and found.gained > found.lost:
            words.append("better")
        elif differs:
            words.append(f"worse, within {MARGIN:.0%}" if as_good else "worse")
        else:
            words.append("as good" if as_good else "undecided")
    return words
