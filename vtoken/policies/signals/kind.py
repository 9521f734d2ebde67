"""Kinds of signals: what the one number is that a live token gets, higher = keep.

A kind is one class in one file of `vtoken.policies.signals.kinds`, or of another package, which
declares it through the entry point group `vtoken.signals`. Its methods are the definition: they run
on numpy arrays and on torch tensors alike, through `vtoken.base.arrays.namespace`. Workers,
self-test and benchmarks take everything about a kind from its class.

Rows: r[q, t] is what query q gives token t, after heads and layers; 0 for tokens after the query.
The queries of `rows` [..., k, n] are the newest k of the n live tokens, oldest first.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np

from vtoken.base.arrays import namespace
from vtoken.policies.packages import load_group

GROUP = "vtoken.signals"
WARM_QUERIES = 32
Array = Any  # a numpy array or a torch tensor; the result is of the same library


class Kind:
    """Base of `AttentionKind` and `KeyKind`.

    `summary`: the number in one phrase, for tables. `depth_percent`: the layer that is probed
    by default, as a share of the model's depth. `linear`: the numbers of a sum of rows are
    the sum of their numbers. `keeps`: what an attention kind keeps of a query; one that keeps bools
    counts, and the rounding of a row may change its number by one.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[Literal["attention", "keys"]]
    depth_percent: ClassVar[int]
    linear: ClassVar[bool]
    queries: ClassVar[Literal["none", "newest", "window", "all"]]
    keeps: ClassVar[Literal["float32", "bool"]] = "float32"

    @property
    def counts(self) -> bool:
        return self.keeps == "bool"

    def default_layer(self, num_layers: int) -> int:
        """The layer at `depth_percent` in a model of `num_layers` layers.

        The shares of built-in kinds are those that kept the most facts in the one model that was
        examined (docs/quality.md).
        """
        return num_layers * self.depth_percent // 100

    def numbers(self, values: Array) -> Array:
        """The numbers [..., n] of rows [..., k, n] or of keys [..., n, D]."""
        raise NotImplementedError


class AttentionKind(Kind):
    """A number made of what queries give to a token. Subclasses define `over_queries`.

    `queries`: the number rests on the "newest" probed query, on a "window" of the newest W that the
    signal names, or on "all". Over all queries, `over_queries` must be a sum: numbers of chunks are
    added. If such a kind is linear, `rows` are the sum [1, n] of a chunk's rows.
    `keeps` is the type of what `of_query` returns.
    """

    source = "attention"
    depth_percent = 70
    linear = True

    def of_query(self, rows: Array) -> Array:
        """What every query alone says of every token, [..., k, n]."""
        return rows

    def over_queries(self, given: Array) -> Array:
        """The numbers [..., n] float32 of the results [..., k, n] of `of_query`."""
        raise NotImplementedError

    def numbers(self, values: Array) -> Array:
        return self.over_queries(self.of_query(values))


class KeyKind(Kind):
    """A number made of a token's cached key, after RoPE, and of the other live tokens' keys.

    Subclasses define `numbers` of the keys [..., n, D] of all live tokens. A query head stands for
    the key of its KV head.
    """

    source = "keys"
    depth_percent = 50
    linear = True  # over heads: each head has numbers of its own, which are averaged
    queries = "none"


class AnchoredKeyKind(KeyKind):
    """A number made of a token's key and of an *anchor*: a sum over tokens, of the live ones or, as
    `Signal.anchor` says, of every one so far. Subclasses define `summands` and `against`.
    """

    def summands(self, keys: Array) -> Array:
        """What each of the keys [..., n, D] adds to the anchor, of the same shape."""
        raise NotImplementedError

    def against(self, keys: Array, anchor: Array) -> Array:
        """The numbers [..., n] of keys [..., n, D] with the anchor [..., D]."""
        raise NotImplementedError

    def numbers(self, values: Array) -> Array:
        return self.against(values, namespace(values).sum(self.summands(values), axis=-2))


BUILT_IN: dict[str, Kind] = {}


def register(cls: type[Kind]) -> type[Kind]:
    """Class decorator: registers a built-in kind under its name."""
    if cls.name in BUILT_IN:
        raise ValueError(f"two kinds of signals are named {cls.name!r}")
    validate(cls)
    BUILT_IN[cls.name] = cls()
    return cls


@cache
def _load_packages() -> tuple[dict[str, Kind], dict[str, str]]:
    """Kinds of other packages by name, and the error of each entry point that failed to load."""
    found, broken = load_group(GROUP, Kind, BUILT_IN, validate)
    return {name: cls() for name, cls in found.items()}, broken


def kinds() -> dict[str, Kind]:
    """Every kind by name: the built-in ones, then those of other packages."""
    return BUILT_IN | _load_packages()[0]


def broken_kinds() -> dict[str, str]:
    """The errors of kinds of other packages that failed to load, by "name (package)"."""
    return dict(_load_packages()[1])


def kind_of(name: str) -> Kind:
    """The kind `name`; raises ValueError that names all kinds."""
    found = BUILT_IN.get(name) or _load_packages()[0].get(name)
    if found is None:
        raise ValueError(f"kind {name!r} is not one of {', '.join(kinds())}")
    return found


def validate(cls: type[Kind]) -> None:
    """Raises ValueError or TypeError unless the declarations of a kind agree with its numbers."""
    for attribute in ("name", "summary"):
        if not isinstance(getattr(cls, attribute, None), str):
            raise ValueError(f"{cls.__name__} has no {attribute}")
    if not issubclass(cls, AttentionKind | KeyKind):
        raise TypeError(f"{cls.__name__} is neither an AttentionKind nor a KeyKind")
    if not 0 <= cls.depth_percent < 100:
        raise ValueError(f"{cls.name}: depth_percent = {cls.depth_percent} is not in 0 .. 99")
    kind, rng = cls(), np.random.default_rng(0)
    values = rng.random((2, 5, 7), dtype=np.float32)  # [heads, k, n], or [heads, n, D]
    num_tokens = 7 if isinstance(kind, AttentionKind) else 5
    found = kind.numbers(values)
    if found.shape != (2, num_tokens) or found.dtype != np.float32:
        raise ValueError(
            f"{cls.name}: numbers of shape {found.shape} and type {found.dtype}, "
            f"not {(2, num_tokens)} and float32"
        )
    if isinstance(kind, AttentionKind):
        _validate_attention(kind, values, found)
    elif isinstance(kind, AnchoredKeyKind) and kind.summands(values).shape != values.shape:
        raise ValueError(f"{cls.name}: summands of another shape than its keys")


def _validate_attention(kind: AttentionKind, rows: Array, numbers: Array) -> None:
    if getattr(kind, "queries", None) not in ("newest", "window", "all"):
        raise ValueError(f"{kind.name}: queries is neither newest nor window nor all")
    given = kind.of_query(rows)
    if given.shape != rows.shape or given.dtype != np.dtype(kind.keeps):
        raise ValueError(
            f"{kind.name}: of_query returns shape {given.shape} and type {given.dtype}, "
            f"not {rows.shape} and {kind.keeps}"
        )
    if kind.linear and not np.allclose(kind.numbers(rows + rows[::-1]), numbers + numbers[::-1]):
        raise ValueError(f"{kind.name} is declared linear, but its numbers do not add up")
    parts = kind.over_queries(given[:, :2]) + kind.over_queries(given[:, 2:])
    if kind.queries == "all" and not np.allclose(parts, numbers):
        raise ValueError(f"{kind.name} is over all queries, but its over_queries is not a sum")
