"""What an eviction policy is: a pure function from a view of one request to its victims.

A policy knows logical token ids only: no blocks, no slots, no vLLM. One file a policy, one class,
registered by `@register`.

Invariants of every policy's answer, checked by the runtime before a token dies:
1. victims are live tokens of the view, each once
2. len(victims) == len(view.token_ids) - view.budget_tokens
3. the newest token is never a victim
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from vtoken.arrays import Bools, Floats, Ints, Ragged
from vtoken.policies.signals import Aggregate, Signal

TokenIds = Ints  # the name in the interface of policies
Need = Literal["attention", "keys", "token_ids"]
Sinks = Annotated[int, Meta(ge=0, le=1024, description="first positions, always kept")]
Recent = Annotated[int, Meta(ge=1, le=8192, description="newest tokens, always kept")]
Heads = Annotated[Aggregate, Meta(description="over the probed heads")]
Layers = Annotated[Aggregate, Meta(description="over the probed layers")]
Pool = Annotated[Aggregate, Meta(description="over live neighbours")]
PoolRadius = Annotated[
    int, Meta(ge=0, le=32, description="live neighbours a side to pool over; kernel 2r + 1")
]


@dataclass(slots=True)
class View:
    """One request between two steps, as its last scheduled step left it. Its arrays cannot be
    written: copy what you sort in place.

    `token_ids` [n]: ids of the live tokens, ascending; a token's id is its RoPE position.
    `num_tokens`: tokens ever computed, dead ones included; the newest has id `num_tokens - 1`.
    `seed`: a number that depends on the prompt alone.
    `scores` [n] float32: the policy's signal, higher = keep, inf for tokens that came after the
    last probe. Empty unless the policy reads one.
    `vocabulary_ids` [n]: which words the tokens are; `special`, `punctuation` [n]: what kind of
    word, as the model's tokenizer says. Empty unless the policy needs "token_ids".
    `profile`: what the policy's `profile` returned for this request.
    """

    token_ids: TokenIds
    num_tokens: int
    num_prompt_tokens: int
    budget_tokens: int
    seed: int = 0
    scores: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    vocabulary_ids: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    special: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    punctuation: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    profile: Any = None

    @property
    def num_victims(self) -> int:
        return max(0, len(self.token_ids) - self.budget_tokens)


class Batch(Protocol):
    """Many requests that are due at once, k of them; `budget` [k] tokens stay of each."""

    budget: Ints

    def oldest(self, sinks: int) -> Ragged:
        """Of each request what `oldest` names."""

    def lowest(self, sinks: int, recent: int | Ints) -> Ragged:
        """Of each request what `lowest` names by its scores; `recent`: for all, or of each [k]."""


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a policy's parameters; bounds stand in the field annotations.

    What belongs to a signal has the same name in every policy: `heads`, `layers`, `queries`,
    `pool`, `pool_radius`.
    """


class Policy:
    """Base of all policies. Subclasses set the class variables and `select_victims`.

    `needs`: "token_ids" for what a token says; attention or keys follow from `signal`.
    `profiles`: whether `profile` is called. Two policies of one class and one set of parameters are
    equal.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str] = "-"
    needs: ClassVar[frozenset[Need]] = frozenset()
    profiles: ClassVar[bool] = False
    Params: ClassVar[type[Params]] = Params
    params: Any
    reads: Signal | None  # what `signal` said

    def __init__(self, params: Any = None) -> None:
        self.params = self.Params() if params is None else params
        self.reads = self.signal()

    def signal(self) -> Signal | None:
        """The signal that `View.scores` brings, under these parameters; None: no scores.

        Asked once, when the policy is made.
        """
        return None

    def profile(self, view: View) -> Any:  # noqa: ARG002
        """Called once a request, when its prompt has been computed, before anything of it dies.

        What it returns is `View.profile` for the rest of the request's life.
        """
        return None

    def select_victims(self, view: View) -> TokenIds:
        """The ids [view.num_victims] that die. Called only when that number is positive."""
        raise NotImplementedError

    def select_many(self, batch: Batch) -> Ragged | None:  # noqa: ARG002
        """The victims of every request of `batch`: those that `select_victims` names for each.

        None: this policy is asked request by request.
        """
        return None

    def min_budget_tokens(self) -> int:
        """The smallest budget under which the parameters make sense."""
        return 1

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
    """Base of the policies whose victims are the lowest scores between the first `params.sinks`
    positions and the newest `recent` tokens.
    """

    Params: ClassVar[type[Params]] = LowestScoresParams

    @property
    def recent(self) -> int:
        """How many of the newest tokens stay."""
        return int(self.params.recent)

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, self.params.sinks, self.recent)

    def select_many(self, batch: Batch) -> Ragged | None:
        return batch.lowest(self.params.sinks, self.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.recent)


def chooses_together(cls: type[Policy]) -> bool:
    """Whether `cls` has a `select_many` that speaks for its own `select_victims`.

    One that was inherited past a `select_victims` of a subclass does not.
    """
    for base in cls.__mro__:
        if "select_many" in vars(base):
            return base is not Policy
        if "select_victims" in vars(base):
            return False
    return False


def lowest(view: View, scores: npt.NDArray[Any], sinks: int, recent: int) -> TokenIds:
    """The `num_victims` lowest-scored ids, sparing the first `sinks` and the `recent` newest.

    `scores` [n], higher = keep; NaN is highest; ties fall on the older token.
    """
    first = int(np.searchsorted(view.token_ids, sinks))
    last = max(first, len(view.token_ids) - max(recent, 1))
    ids: TokenIds = view.token_ids[first:last]
    window = scores[first:last]
    if view.num_victims >= len(ids):
        return ids
    bar = np.partition(window, view.num_victims)[view.num_victims]  # the lowest score that stays
    if np.isnan(bar):  # NaN sorts last
        chosen, tied = ~np.isnan(window), np.isnan(window)
    else:
        chosen, tied = window < bar, window == bar
    missing = view.num_victims - int(np.count_nonzero(chosen))
    chosen[np.flatnonzero(tied)[:missing]] = True
    victims: TokenIds = ids[chosen]
    return victims


def oldest(view: View, sinks: int) -> TokenIds:
    """The `num_victims` oldest ids, sparing the first `sinks`."""
    first = int(np.searchsorted(view.token_ids, sinks))
    return view.token_ids[first : first + view.num_victims]


BUILT_IN: dict[str, type[Policy]] = {}


def register(cls: type[Policy]) -> type[Policy]:
    """Class decorator of the built-in policies: makes the class known by its name."""
    if cls.name in BUILT_IN:
        raise ValueError(f"two policies are named {cls.name!r}")
    validate(cls)
    BUILT_IN[cls.name] = cls
    return cls


def validate(cls: type[Policy]) -> None:
    """Raises ValueError when what a policy declares does not fit together."""
    for attribute in ("name", "summary"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise ValueError(f"{cls.__name__} has no {attribute}")
    policy = cls()
    check_declared(policy)
    signal = policy.reads
    declared = cls.needs & {"attention", "keys"}
    if not declared <= _read_by(policy):
        raise ValueError(f"{cls.name} reads {signal}, but declares that it needs {set(declared)}")


def needs_of(policy: Policy) -> list[Need]:
    """What `policy` declares that it needs, and what its signal reads."""
    return sorted(policy.needs | _read_by(policy))


def _read_by(policy: Policy) -> frozenset[Need]:
    if policy.reads is None:
        return frozenset()
    return frozenset({policy.reads.source, *(("keys",) if policy.reads.is_mixed else ())})


def check_declared(policy: Policy) -> None:
    """Raises when what `policy` says of itself under its parameters is of the wrong kind: the
    engine relies on it between two steps.
    """
    if not isinstance(policy.reads, Signal | None):
        raise TypeError(f"{policy.name}.signal() is {policy.reads!r}, no Signal")
    if policy.reads is not None and (policy.reads.layers or policy.reads.heads):
        raise ValueError(
            f"{policy.name} names layers or heads: `probe` and the profile choose them"
        )
    least = index(policy.min_budget_tokens())
    if least < 1:
        raise ValueError(f"{policy.name} would keep {least} tokens")
