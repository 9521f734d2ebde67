"""Claims of results: one number each, with its interval and its goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Self

from scipy.stats import t as student_t


@dataclass
class Claim:
    """One number that the evaluation claims, with its range over the repeats.

    `row`: the part, or figure, table or section of the paper.
    `interval`: 95% confidence interval, which decides a goal; without one a goal has no verdict.
    `values`: those of the repeats, in their order, unless all are equal.
    """

    row: str
    what: str
    model: str
    value: float
    low: float
    high: float
    unit: str  # "%", "points", "x", "blocks", ...
    repeats: int
    goal: str = ""  # ">= 1.5" or "<= 3"
    interval: tuple[float, float] | None = None
    values: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        row: str,
        what: str,
        model: str,
        values: Sequence[float],
        unit: str,
        *,
        goal: str = "",
    ) -> Self:
        """The median of the repeats' `values`, with Student's interval of their mean."""
        middle = median(values), min(values), max(values)
        interval = student_interval(values)
        return cls(row, what, model, *middle, unit, len(values), goal, interval, list(values))

    def verdict(self) -> str:
        """met, missed or undecided: where the interval is; "" without goal or interval."""
        if not self.goal or self.interval is None:
            return ""
        relation, bound = self.goal.split()
        low, high = self.interval
        sign = {">=": 1, "<=": -1}[relation]
        right = [sign * (end - float(bound)) >= 0 for end in (low, high)]
        return "met" if all(right) else "undecided" if any(right) else "missed"


def student_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% Student t interval of the mean; None for less than three values."""
    if len(values) < 3:
        return None
    quantile = float(student_t.ppf(0.975, len(values) - 1))
    half = quantile * stdev(values) / len(values) ** 0.5
    middle = fmean(values)
    return middle - half, middle + half
