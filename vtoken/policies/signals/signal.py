"""A signal: one number a live token, higher = keep, of one kind under given aggregates.

`vtoken.policies.signals.kinds` defines the kinds. Policies read the numbers; workers make them. A
signal is computed in these steps, in this order. The first four are each a mean or a maximum:

    heads       a[l, q, t] over the probed query heads h of layer l, of the softmax a[l, h, q, t]
                over the live tokens that query q can see (ids up to its own), and over the head's
                sink if the model has attention sinks
    layers      the row r[q, t] over the probed layers of a[l, q, t]. Of means alone it sums to 1,
                or to less with attention sinks
    queries     by the kind: one number for every live token t
    neighbours  over the 2 `pool_radius` + 1 live tokens around t, in the order of ids. The newest
                max(W, 1) tokens are excluded in both directions, since the queries of a window
                attend to each other. In a mean, a neighbour that does not exist counts 0
    redundancy  `mix_lambda` * the value so far - (1 - `mix_lambda`) * the token's redundancy among
                all currently live keys, a mean over probed heads and layers; see `redundancy`. Not
                for signals of keys; none where `mix_lambda` is 1

A signal of keys has a number for each head of each layer in place of rows. Its *anchor*, if its
kind has one, is a sum over the live tokens, or over all tokens *seen*: those that were live at the
first reading of the signal after they were computed. A token that comes back later counts once.

Rows exist for every computed prompt query (not for prefix-cache hits) and for the decode query of
every `probe.every_steps`-th step: these are the *probed* queries.

1. A query before t has r[q, t] = 0.
2. Rows are not recomputed: attention that went to tokens which died later is not redistributed, and
   neighbours are those that were live at the newest probed query. A token that was dead at a probed
   query and is live again has what all queries gave it in a signal over all of them; in a window,
   what those gave it that came after the newest such query.
3. A signal over several queries is not reported before `warm_queries` of them were probed, or every
   query since the request's first token.
4. Equal signals have equal numbers: layers and heads are part of a signal. A policy leaves them
   empty, and `vtoken.core.runtime.ranking` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from vtoken.policies.signals.kind import WARM_QUERIES, AnchoredKeyKind, Kind, kind_of

Array = TypeVar("Array")  # of numpy or of torch
Aggregate = Literal["mean", "max"]
Anchor = Literal["live", "seen"]


@dataclass(frozen=True, slots=True)
class Signal:
    """A kind of signal and how it is aggregated; raises ValueError if the parts are inconsistent.

    `kind`: its name. `window_queries`: W for the kinds that have a window, 0 for the others.
    `layers`: the probed layers. `heads`: query heads of the complete model, over all ranks, the
    same in each layer; (): all.
    """

    kind: str
    window_queries: int = 0
    over_heads: Aggregate = "mean"
    over_layers: Aggregate = "mean"
    pool: Aggregate = "mean"
    pool_radius: int = 0
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    mix_lambda: float = 1.0
    anchor: Anchor = "live"

    def __post_init__(self) -> None:
        if (self.window_queries > 0) != (self.definition.queries == "window"):
            raise ValueError(f"{self.kind} with a window of {self.window_queries} queries")
        for name in ("over_heads", "over_layers", "pool"):
            if getattr(self, name) not in get_args(Aggregate):
                raise ValueError(f"{name} = {getattr(self, name)!r} is neither mean nor max")
        if self.pool_radius < 0:
            raise ValueError(f"pool_radius = {self.pool_radius} is negative")
        if not 0 <= self.mix_lambda <= 1:
            raise ValueError(f"mix_lambda = {self.mix_lambda} is not in 0 .. 1")
        if self.is_mixed and self.of_keys:
            raise ValueError(f"{self.kind} is a signal of keys, which redundancy is not mixed into")
        if self.anchor not in get_args(Anchor):
            raise ValueError(f"anchor = {self.anchor!r} is neither live nor seen")
        if self.anchor == "seen" and not isinstance(self.definition, AnchoredKeyKind):
            raise ValueError(f"{self.kind} has no anchor")
        if self.sums_rows and "max" in (self.over_heads, self.over_layers):
            raise ValueError(f"{self.kind} takes the mean over heads and layers, not the maximum")

    @property
    def definition(self) -> Kind:
        return kind_of(self.kind)

    @property
    def source(self) -> Literal["attention", "keys"]:
        return self.definition.source

    @property
    def of_keys(self) -> bool:
        return kind_of(self.kind).source == "keys"

    @property
    def sums_rows(self) -> bool:
        """Whether workers sum the queries of a chunk in every layer and keep no single row."""
        return self.definition.queries == "all" and self.definition.linear

    @property
    def is_mixed(self) -> bool:
        """Whether redundancy is mixed in."""
        return self.mix_lambda < 1

    @property
    def parts(self) -> int:
        """How many rows are kept separately until all layers have run.

        One if heads and layers have the same aggregate, since then their order does not matter;
        else one a layer.
        """
        return 1 if self.over_heads == self.over_layers else len(self.layers)

    @property
    def is_linear(self) -> bool:
        """Whether the numbers over two disjoint sets of heads add up to those over their union."""
        return (
            self.definition.linear
            and self.over_heads == "mean"
            and (self.over_layers == "mean" or len(self.layers) == 1)
            and (self.pool == "mean" or self.pool_radius == 0)
        )

    @property
    def warm_queries(self) -> int:
        """The probed queries that a report rests on at least, if some were not probed."""
        most = {"none": 0, "newest": 1, "window": self.window_queries, "all": WARM_QUERIES}
        return min(most[self.definition.queries], WARM_QUERIES)

    @property
    def first_report(self) -> str:
        """What a running request waits for when the signal starts from zero, in words."""
        if self.warm_queries > 1:
            return f"{self.warm_queries} probed queries of it, or its whole prompt"
        return "its next probed query" if self.warm_queries else "its next step"

    def from_rows(self, rows: Array) -> Array:
        """The numbers [..., n], before neighbours, of the rows [..., k, n] of all probed queries.

        `rows` as in `vtoken.policies.signals.kind`. This is the definition that every accumulator
        equals.
        """
        newest: Any = rows
        found: Array = self.definition.numbers(newest[..., -self.num_rows(newest.shape[-2]) :, :])
        return found

    def mixed(self, attention: Array, redundancy: Array) -> Array:
        """The last step: the signal [n] from the value [n] so far and the redundancy [n]."""
        share: Any = self.mix_lambda
        found: Array = share * attention - (1 - share) * redundancy
        return found

    def num_rows(self, num_queries: int) -> int:
        """How many of a step's newest `num_queries` matter."""
        if self.definition.queries == "all":
            return num_queries
        return min(num_queries, self.window_queries or 1)

    def num_pooled(self, num_live: int) -> int:
        """How many of `num_live` tokens, the oldest, are pooled over neighbours."""
        return max(0, num_live - max(self.window_queries, 1)) if self.pool_radius else 0

    def __str__(self) -> str:
        parts = []
        for name, numbers in (("layer", self.layers), ("head", self.heads)):
            if numbers:
                many = "s" if len(numbers) > 1 else ""
                parts.append(f"{name}{many} {', '.join(map(str, numbers))}")
        parts += [
            f"max over {n}" for n in ("heads", "layers") if getattr(self, f"over_{n}") == "max"
        ]
        if self.pool_radius:
            parts.append(f"{self.pool} over {self.pool_radius} neighbours a side")
        if self.anchor == "seen":
            parts.append("anchor of all tokens seen")
        if self.is_mixed:
            parts.append(f"less redundancy, lambda {self.mix_lambda:g}")
        kind = f"{self.kind}({self.window_queries})" if self.window_queries else self.kind
        return f"{kind} ({'; '.join(parts)})" if parts else kind
