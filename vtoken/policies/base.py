"""The interface of an eviction policy: a pure function from views of requests to their victims.

A policy works on token ids alone: no blocks, no slots, no vLLM. Each policy is one class in a file
of its own, registered by `@register`.

Invariants of every policy's result, checked by the runtime before a token dies:
1. victims are live tokens of the view, each once
2. len(victims) == len(view.token_ids) - view.budget_tokens
3. the newest token is never a victim
"""

from __future__ import annotations

from functools import cached_property
from operator import index
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from vtoken.base.arrays import Ragged
from vtoken.base.errors import InvariantViolation
from vtoken.policies.selection import ViewBatch
from vtoken.policies.signals import Aggregate, Signal
from vtoken.policies.view import Batch, TokenIds, View
from vtoken.wire import PolicyChoice

Need = Literal["attention", "keys", "token_ids"]
Sinks = Annotated[int, Meta(ge=0, le=1024, description="first positions, always kept")]
Recent = Annotated[int, Meta(ge=1, le=8192, description="newest tokens, always kept")]
Heads = Annotated[Aggregate, Meta(description="over the probed heads")]
Layers = Annotated[Aggregate, Meta(description="over the probed layers")]
Pool = Annotated[Aggregate, Meta(description="over live neighbours")]
PoolRadius = Annotated[
    int, Meta(ge=0, le=32, description="live neighbours a side to pool over; kernel 2r + 1")
]


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a policy's parameters; field annotations declare their bounds.

    A signal's parameters have the same names in every policy: `heads`, `layers`, `queries`, `pool`,
    `pool_radius`.
    """


class Policy:
    """Base of all policies. Subclasses set the class variables and define `select_many`, or
    `select_victims` for one request at a time.

    `needs`: "token_ids" to receive vocabulary ids; attention and keys follow from `signal`.
    `profiles`: whether `profile` is called. Policies of equal class and parameters are equal.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str] = "-"
    needs: ClassVar[frozenset[Need]] = frozenset()
    profiles: ClassVar[bool] = False
    Params: ClassVar[type[Params]] = Params
    params: Any
    reads: Signal | None  # the result of `signal`

    def __init__(self, params: Any = None) -> None:
        self.params = self.Params() if params is None else params
        self.reads = self.signal()

    def signal(self) -> Signal | None:
        """The signal of `View.scores` under these parameters; None: no scores.

        Called once, by the constructor.
        """
        return None

    @property
    def recent(self) -> int:
        """How many of the newest live tokens it never evicts, at least 1.

        The scores of a policy that reads keys may lack that many tokens.
        """
        return 1

    def profile(self, view: View) -> Any:  # noqa: ARG002
        """Called once a request, after its prompt is computed and before its first eviction.

        The return value is `View.profile` in all later views of the request.
        """
        return None

    def select_many(self, batch: Batch) -> Ragged | None:
        """The ids to evict of every request of `batch`; None: those that `select_victims` names.

        The runtime calls nothing else, also for one request.
        """
        return self.select_each(batch)

    def select_victims(self, view: View) -> TokenIds:
        """The ids [view.num_victims] to evict. Called only if that number is positive."""
        found = self.select_many(ViewBatch([view]))
        assert found is not None
        return found.of(0)

    def select_each(self, batch: Batch) -> Ragged:
        """What `select_victims` names in each view; raises InvariantViolation if it is invalid.

        The expected number is read before, because a policy may modify its view.
        """
        return Ragged.joined(
            checked(view, view.num_victims, self.select_victims(view)) for view in batch.views()
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class that defines one of the two ways to choose does not inherit the other one."""
        super().__init_subclass__(**kwargs)
        own = vars(cls).keys() & {"select_many", "select_victims"}
        if own == {"select_victims"}:
            cls.select_many = Policy.select_many  # type: ignore[method-assign]
        elif own == {"select_many"}:
            cls.select_victims = Policy.select_victims  # type: ignore[method-assign]

    def min_budget_tokens(self) -> int:
        """The smallest budget that the parameters allow."""
        return 1

    @cached_property
    def choice(self) -> PolicyChoice:
        """Its name and all its parameters, made once: do not write to it."""
        return PolicyChoice(name=self.name, params=msgspec.structs.asdict(self.params))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.params == other.params

    def __hash__(self) -> int:
        return hash(type(self))


class LowestScoresParams(Params, frozen=True):
    """Parameters of a policy that ranks by one signal."""

    sinks: Sinks = 0
    recent: Recent = 1
    heads: Heads = "mean"
    layers: Layers = "mean"
    pool: Pool = "mean"
    pool_radius: PoolRadius = 0


class LowestScores(Policy):
    """Base of the policies that evict the lowest scores, sparing the first `params.sinks` positions
    and the newest `recent` tokens.
    """

    Params: ClassVar[type[Params]] = LowestScoresParams

    @property
    def recent(self) -> int:
        return int(self.params.recent)

    def select_many(self, batch: Batch) -> Ragged:
        return batch.lowest(self.params.sinks, self.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.recent)


def checked(view: View, num_victims: int, victims: Any) -> TokenIds:
    """`victims` of `view`, ascending; raises InvariantViolation unless they are `num_victims` ids
    of it without the newest.
    """
    named = np.asarray(victims)
    found = np.unique(named)
    if len(found) != named.size or len(found) != num_victims:
        raise InvariantViolation(
            "policy", f"{len(found)} different victims of {named.size}, not {num_victims}"
        )
    if found.dtype.kind not in "iu":
        raise InvariantViolation("policy", f"victims of type {found.dtype} are not token ids")
    found = found.astype(np.int64)
    unknown_ids = found[~np.isin(found, view.token_ids, assume_unique=True)]
    if len(unknown_ids):
        raise InvariantViolation(
            "policy", f"victims {unknown_ids[:5].tolist()} are not live, or protected"
        )
    if len(found) and found[-1] == view.token_ids[-1]:
        raise InvariantViolation("policy", f"the newest token {found[-1]} is a victim")
    return found


BUILT_IN: dict[str, type[Policy]] = {}


def register(cls: type[Policy]) -> type[Policy]:
    """Class decorator: registers a built-in policy under its name."""
    if cls.name in BUILT_IN:
        raise ValueError(f"two policies are named {cls.name!r}")
    validate(cls)
    BUILT_IN[cls.name] = cls
    return cls


def validate(cls: type[Policy]) -> None:
    """Raises ValueError or TypeError if the declarations of a policy are inconsistent."""
    for attribute in ("name", "summary"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise ValueError(f"{cls.__name__} has no {attribute}")
    if cls.select_many is Policy.select_many and cls.select_victims is Policy.select_victims:
        raise ValueError(f"{cls.name} defines neither select_many nor select_victims")
    policy = cls()
    check_declared(policy)
    signal = policy.reads
    declared = cls.needs & {"attention", "keys"}
    if not declared <= _read_by(policy):
        raise ValueError(f"{cls.name} reads {signal}, but declares that it needs {set(declared)}")


def needs_of(policy: Policy) -> list[Need]:
    """The declared needs of `policy` and those of its signal."""
    return sorted(policy.needs | _read_by(policy))


def _read_by(policy: Policy) -> frozenset[Need]:
    reads = policy.reads
    if reads is None:
        return frozenset()
    return frozenset({reads.source, *(("keys",) if reads.is_mixed else ())})


def check_declared(policy: Policy) -> None:
    """Raises if the signal or the minimum budget of `policy` is invalid; the engine uses both."""
    if not isinstance(policy.reads, Signal | None):
        raise TypeError(f"{policy.name}.signal() is {policy.reads!r}, not a Signal")
    if policy.reads is not None and (policy.reads.layers or policy.reads.heads):
        raise ValueError(
            f"{policy.name} names layers or heads: `probe` and the profile choose them"
        )
    least = index(policy.min_budget_tokens())
    if least < 1:
        raise ValueError(f"{policy.name}.min_budget_tokens() is {least}, not at least 1")
