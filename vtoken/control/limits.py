"""A guard beside the value that it is on: crossed or not, and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from vtoken.wire import Guard
from vtoken.wire.guards import Series


@dataclass(frozen=True, slots=True)
class Limit:
    """A guard and the value of its series now.

    `value`: None if there is none. `count`: samples that it rests on; `error`: its standard error.
    """

    guard: Guard
    series: Series
    value: float | None
    count: int | None = None
    error: float | None = None

    @property
    def name(self) -> str:
        return self.series.title

    @property
    def evaluated(self) -> bool:
        """Whether there is a value, and it rests on enough samples."""
        needed = self.guard.min_count
        return self.value is not None and (needed is None or (self.count or 0) >= needed)

    @property
    def crossed(self) -> bool:
        if self.value is None or not self.evaluated:
            return False
        limit = self.guard.limit
        return self.value > limit if self.guard.below is None else self.value < limit

    def document(self) -> Guard:
        return structs.replace(self.guard, value=self.value, count=self.count)

    def shown(self) -> tuple[str, str]:
        """Value and limit, with as many digits as tell them apart."""
        assert self.value is not None
        bound = self.series.shown(self.guard.limit, 15)
        for digits in (3, 6, 15):
            value = self.series.shown(self.value, digits)
            if value != bound:
                break
        return value, bound

    def __str__(self) -> str:
        needed, samples = self.guard.min_count, self.series.samples
        if not self.evaluated:
            so_far = f"{self.count or 0} of {needed} {samples}" if samples else "it has no value"
            return f"{self.name} not evaluated, {so_far}"
        over, under = (">", "<=") if self.guard.below is None else ("<", ">=")
        value, bound = self.shown()
        error = "" if self.error is None else f" ± {self.error:.2g}"
        rests = f" over {self.count:,} {samples}" if samples else ""
        return f"{self.name} {value}{error} {over if self.crossed else under} {bound}{rests}"
