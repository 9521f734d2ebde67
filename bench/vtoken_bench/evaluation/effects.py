"""Figures over repeats: their spread, and ratios of the same repeat with their intervals.

Every repeat has engine processes of its own, so the repeats are independent. Ratios multiply, so
their means and intervals are of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from vtoken_bench.claims import Claim, student_interval
from vtoken_bench.evaluation.points import Labels, Run, pick
from vtoken_bench.evaluation.variants import NATIVE

Figure = Callable[[Run], float]
# How tables show an effect, for their notes.
SHOWN = (
    "geometric mean of the ratios of the same repeat [95% interval, Student t of the mean "
    "logarithm]"
)


def speed(run: Run) -> float:
    """Output tokens a second."""
    return run.figure("tokens") / run.figure("seconds")


def busy_speed(run: Run) -> float:
    """The same while every client had a request, without the end of the run."""
    return run.figure("busy.tokens") / run.figure("busy.seconds")


def packing_share(run: Run) -> float:
    """Share of the time in which holes were packed for attention: CPU alone packs."""
    return float(run.figures.get("pack_us", 0)) / (1e6 * run.figure("seconds"))


def unpacked_speed(run: Run) -> float:
    """`busy_speed` if packing took no time. It is taken to be spread evenly over the run."""
    return busy_speed(run) / (1 - packing_share(run))


def cpu_seconds(run: Run) -> float:
    """CPU time of the engine's steps."""
    return run.figure("cpu_seconds")


def spread(values: Sequence[float]) -> str:
    """The median, and the range where there is one, as tables show it."""
    low, high = min(values), max(values)
    if low == high:
        return _number(low)
    return f"{_number(median(values))} [{_number(low)} .. {_number(high)}]"


def paired(runs: Sequence[Run], figure: Figure, one: Labels, other: Labels) -> list[float]:
    """`figure` of one over other's, repeat by repeat: both ran side by side in each."""
    firsts = {run.repeat: figure(run) for run in pick(runs, **one)}
    seconds = {run.repeat: figure(run) for run in pick(runs, **other)}
    both = sorted(firsts.keys() & seconds.keys())
    return [firsts[n] / seconds[n] for n in both if seconds[n]]


@dataclass(frozen=True, slots=True)
class Effect:
    """One ratio a repeat; `factor` is their geometric mean."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[Run], figure: Figure, one: Labels, other: Labels) -> Effect | None:
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
        found = student_interval(self.logs)
        return None if found is None else (math.exp(found[0]), math.exp(found[1]))

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
        return found, student_interval([count * found - (count - 1) * one for one in left_out])

    def claim(self, row: str, what: str, model: str, goal: str = "") -> Claim:
        """The claim; its value is the geometric mean, and its interval that of logarithms."""
        values = list(self.values)
        middle = self.factor, min(values), max(values)
        return Claim(row, what, model, *middle, "x", len(values), goal, self.interval(), values)

    def __str__(self) -> str:
        return f"{self.factor:.2f}{bounds(self.interval())}"


def over_native(runs: Sequence[Run], figure: Figure, variant: str) -> Effect:
    """`figure` of the variant over native's, which is in every repeat; `runs` are of one load."""
    found = Effect.of(runs, figure, {"variant": variant}, {"variant": NATIVE})
    assert found is not None
    return found


def bounds(interval: tuple[float, float] | None, form: str = ".2f") -> str:
    """ " [low .. high]", or nothing without an interval."""
    if interval is None:
        return ""
    return f" [{interval[0]:{form}} .. {interval[1]:{form}}]"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
