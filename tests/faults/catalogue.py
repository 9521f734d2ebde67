"""Faults, and which check noticed one.

An injected fault first meets only the product's own checks. If none notices it, the oracle checks
whether wrong contents were read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vtoken.base.errors import InvariantViolation, MirrorMismatchError

REPORTERS = ("violated", "_violated", "check_private")  # on behalf of the function before them


@dataclass(slots=True)
class Hit:
    """Records the step of the first damage; a fault calls it at every damage."""

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
    """`rule`: what it breaks. `inject(engine, hit)` arms the fault, which calls `hit` at damage.
    `by`: the expected beginning of `Noticed.by`.
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
    """Which check raised `error`, from its traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = [f.f_code for f in frames if f.f_code.co_name not in REPORTERS]
    check = codes[-1].co_qualname
    if isinstance(error, InvariantViolation):
        by, detail = f"{error.invariant}, `{check}`", error.detail
    elif isinstance(error, MirrorMismatchError):
        by, detail = f"mirror, `{check}`", str(error)
    elif isinstance(error, AssertionError):
        by, detail = "wrong contents are read", str(error).splitlines()[0]
    else:
        raise error
    return Noticed(by, detail, hit.clock() - (hit.clock() if hit.at is None else hit.at))
