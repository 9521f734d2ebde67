"""The interface of an eviction policy: a pure function from a view of one request to its victims.

A policy works on token ids alone: no blocks, no slots, no vLLM. Each policy is one class in a file
of its own, registered by `@register`.

Invariants of every policy's result, checked by the runtime before a token dies:
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
    """One request between two steps, after its last scheduled step. Its arrays are read-only: copy
    an array before sorting it in place.

    `token_ids` [n]: ids of the live tokens, ascending; a token's id is its RoPE position.
    `num_tokens`: tokens ever computed, dead ones included; the newest has id `num_tokens - 1`.
    `seed`: a number that depends on the prompt alone.
    `scores` [n] float32: the policy's signal, higher = keep, inf for tokens appended after the last
    probe. Empty unless the policy has a signal.
    `vocabulary_ids` [n]; `special`, `punctuation` [n]: the tokens' kinds according to the model's
    tokenizer. Empty unless the policy needs "token_ids".
    `profile`: the return value of the policy's `profile` for this request.
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
    """The k requests that are due for eviction at once; each keeps `budget` [k] tokens."""

    budget: Ints

    def oldest(self, sinks: int) -> Ragged:
        """The victims that `oldest` chooses in each request."""

    def lowest(self, sinks: int, recent: int | Ints) -> Ragged:
        """The victims that `lowest` chooses in each request by its scores.

        `recent`: one number for all requests, or one for each [k].
        """


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a policy's parameters; field annotations declare their bounds.

    A signal's parameters have the same names in every policy: `heads`, `layers`, `queries`, `pool`,
    `pool_radius`.
    """


class Policy:
    """Base of all policies. Subclasses set the class variables and define `select_victims`.

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

    def profile(self, view: View) -> Any:  # noqa: ARG002
        """Called once a request, after its prompt is computed and before its first eviction.

        The return value is `View.profile` in all later views of the request.
        """
        return None

    def select_victims(self, view: View) -> TokenIds:
        """The ids [view.num_victims] to evict. Called only if that number is positive."""
        raise NotImplementedError

    def select_many(self, batch: Batch) -> Ragged | None:  # noqa: ARG002
        """The victims of every request of `batch`, equal to those of `select_victims`.

        None: the policy does not support batches, and `select_victims` is called for each request.
        """
        return None

    def min_budget_tokens(self) -> int:
        """The smallest budget that the parameters allow."""
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
    """Base of the policies that evict the lowest scores, sparing the first `params.sinks` positions
    and the newest `recent` tokens.
    """

    Params: ClassVar[type[Params]] = LowestScoresParams

    @property
    def recent(self) -> int:
        """Size of the recent window."""
        return int(self.params.recent)

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, self.params.sinks, self.recent)

    def select_many(self, batch: Batch) -> Ragged | None:
        return batch.lowest(self.params.sinks, self.recent)

    def min_budget_tokens(self) -> int:
        return int(self.params.sinks + self.recent)


def supports_batches(cls: type[Policy]) -> bool:
    """Whether `cls` has a `select_many` that matches its `select_victims`.

    An inherited `select_many` does not match if a subclass has overridden `select_victims`.
    """
    for base in cls.__mro__:
        if "select_many" in vars(base):
            return base is not Policy
        if "select_victims" in vars(base):
            return False
    return False


def lowest(view: View, scores: npt.NDArray[Any], sinks: int, recent: int) -> TokenIds:
    """The `num_victims` lowest-scored ids, sparing the first `sinks` and the `recent` newest.

    `scores` [n], higher = keep; NaN ranks highest; of equal scores the older token is evicted.
    """
    first = int(np.searchsorted(view.token_ids, sinks))
    last = max(first, len(view.token_ids) - max(recent, 1))
    ids: TokenIds = view.token_ids[first:last]
    window = scores[first:last]
    if view.num_victims >= len(ids):
        return ids
    threshold = np.partition(window, view.num_victims)[view.num_victims]  # the lowest score kept
    if np.isnan(threshold):  # NaN sorts last
        chosen, tied = ~np.isnan(window), np.isnan(window)
    else:
        chosen, tied = window < threshold, window == threshold
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
