"""Ratios over repeats, as factors: they multiply, so their means and intervals are of logarithms.

Every repeat has engine processes of its own, so the repeats are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from vtoken_bench.claims import Claim
from vtoken_bench.evaluation.points import Labels, Run, paired, spread
from vtoken_bench.evaluation.variants import NATIVE

# How tables show an effect, for their notes.
SHOWN = (
    "geometric mean of the ratios of the same repeat [95% interval, Student t of the mean "
    "logarithm]"
)


@dataclass(frozen=True, slots=True)
class Effect:
    """One ratio a repeat; `factor` is their geometric mean."""

    values: tuple[float, ...]

    @classmethod
    def of(
        cls, runs: Sequence[Run], figure: Callable[[Run], float], one: Labels, other: Labels
    ) -> Effect | None:
        """`one` over `other`, paired by repeat; None if no repeat has both."""
        found = paired(runs, figure, one, other)
        return cls(tuple(found)) if found else None

    @property
    def logs(self) -> list[float]:
        return [math.log(value) for value in self.values]

    @property
    def factor(self) -> float:
        return math.exp(fmean(self.logs))

    def interval(self) -> tuple[float, float] | None:
        """95% Student t interval of the mean logarithm, as factors; None for fewer than three."""
        found = spread(self.logs).interval()
        return None if found is None else (math.exp(found[0]), math.exp(found[1]))

    def verdict(self) -> str:
        """more, less, or undecided where the interval has 1 or there is none."""
        found = self.interval()
        if found is None or found[0] <= 1 <= found[1]:
            return "undecided"
        return "more" if found[0] > 1 else "less"

    def share(self, whole: Effect) -> tuple[float, tuple[float, float] | None]:
        """The share of the logarithm of `whole`, and its 95% interval.

        The interval is the jackknife's: Student t over the pseudo-values of leaving out a repeat.
        `whole` has the same repeats. None for fewer than three.
        """
        own, all_ = self.logs, whole.logs
        count, found = len(own), sum(own) / sum(all_)
        if count < 3:
            return found, None
        left_out = [
            (sum(own) - mine) / (sum(all_) - its) for mine, its in zip(own, all_, strict=True)
        ]
        return found, spread([count * found - (count - 1) * value for value in left_out]).interval()

    def claim(self, row: str, what: str, model: str, goal: str = "", paper: str = "") -> Claim:
        """The claim; its value is the geometric mean, and its interval that of logarithms."""
        values = list(self.values)
        middle = self.factor, min(values), max(values)
        return Claim(
            row, what, model, *middle, "x", len(values), paper, goal, self.interval(), values
        )

    def __str__(self) -> str:
        return f"{self.factor:.2f}{bounds(self.interval())}"


def over_native(runs: Sequence[Run], figure: Callable[[Run], float], variant: str) -> Effect:
    """`figure` of the variant over native's, which is in every repeat; `runs` are of one load."""
    found = Effect.of(runs, figure, {"variant": variant}, {"variant": NATIVE})
    assert found is not None
    return found


def bounds(interval: tuple[float, float] | None, form: str = ".2f") -> str:
    """ " [low .. high]", or nothing without an interval."""
    if interval is None:
        return ""
    return f" [{interval[0]:{form}} .. {interval[1]:{form}}]"
