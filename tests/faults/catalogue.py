"""What a fault is, and how it is told what noticed it.

A fault is injected on purpose. First only the product's own checks may notice it; only if none
does, the oracle that watches every read is asked whether wrong contents were read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vtoken.errors import InvariantViolation, MirrorMismatchError

REPORTERS = ("violated", "_violated")  # they pass on what somebody else has found


@dataclass(slots=True)
class Hit:
    """When the damage was first done; calling it says: now."""

    clock: Callable[[], int]
    at: int | None = None
    times: int = 0

    def __call__(self) -> None:
        self.times += 1
        if self.at is None:
            self.at = self.clock()


@dataclass(frozen=True, slots=True)
class Noticed:
    """`by`: the invariant and the check that fired. `steps`: engine steps after the damage."""

    by: str
    detail: str
    steps: int


@dataclass(frozen=True, slots=True)
class Fault:
    """`rule`: what it breaks. `inject(engine, hit)` arms it and calls `hit` when it does damage.
    `by`: what must notice it, the beginning of `Noticed.by`.
    """

    name: str
    rule: str
    by: str
    inject: Callable[[Any, Hit], None]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Catalogue:
    """`@catalogue.fault(rule, by)` registers a function; its docstring is the fault's name."""

    faults: list[Fault] = field(default_factory=list)

    def fault(self, rule: str, by: str, **options: Any) -> Callable[[Any], Any]:
        def add(inject: Any) -> Any:
            name = " ".join(inject.__doc__.split()).rstrip(".")
            self.faults.append(Fault(name, rule, by, inject, options))
            return inject

        return add


def noticed(error: BaseException, hit: Hit) -> Noticed:
    """Which check raised `error`, by its place in the code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = [f.f_code for f in frames if f.f_code.co_name not in REPORTERS]
    place = codes[-1].co_qualname
    if isinstance(error, InvariantViolation):
        by, detail = f"{error.invariant}, `{place}`", error.detail
    elif isinstance(error, MirrorMismatchError):
        by, detail = f"mirror, `{place}`", str(error)
    elif isinstance(error, AssertionError):
        by, detail = "wrong contents are read", str(error).splitlines()[0]
    else:
        raise error
    return Noticed(by, detail, hit.clock() - (hit.clock() if hit.at is None else hit.at))
