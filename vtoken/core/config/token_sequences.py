"""Sequences of token ids: what two have in common, and where one occurs in another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.base.arrays import Ints

Span = tuple[int, int]  # [start, end) of token ids
Spans = tuple[Span, ...]
Part = Sequence[int] | Ints


def num_common(a: Ints, b: Part) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != np.asarray(b[:n], dtype=np.int64))
    return int(differs[0]) if len(differs) else n


def common_start(first: Ints, *others: Ints) -> Ints:
    return first[: min((num_common(first, other) for other in others), default=len(first))]


def common_end(*parts: Ints) -> Ints:
    return common_start(*(part[::-1] for part in parts))[::-1]


def begins(ids: Ints, part: Part) -> bool:
    """Whether `ids` begins with `part`."""
    return num_common(ids, part) == len(part)


def occurrences(ids: Ints, part: Part) -> list[int]:
    """Where `part` begins in `ids`, ascending; nowhere if it is empty."""
    if not len(part):
        return []
    found = np.flatnonzero(ids[: max(0, len(ids) - len(part) + 1)] == part[0])
    for offset, token in enumerate(part[1:], 1):
        found = found[ids[found + offset] == token]
    starts: list[int] = found.tolist()
    return starts
