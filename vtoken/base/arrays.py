"""The array types of the core. Argument names imply contents: `ids` are token ids, `slots` are
cache slots (`block_id * S + offset`), `blocks` are block ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


def namespace(array: Any) -> Any:
    """numpy for an array of numpy, torch for a tensor.

    Code that runs on both uses functions that both have under one name and one signature: `sum`,
    `mean`, `amax`, `clip`, `arange`, `linalg.vector_norm`, with `axis` and `keepdims`. Torch is not
    imported here.
    """
    return sys.modules[type(array).__module__.partition(".")[0]]


def starts_of(counts: Ints | Sequence[int]) -> Ints:
    """Offsets [R + 1] of R consecutive parts of `counts` [R] numbers: starts and the final end."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def spans(first: Ints, counts: Ints) -> Ragged:
    """Consecutive numbers first[i], first[i] + 1, …, counts[i] of them in part i of R."""
    starts = starts_of(counts)
    return Ragged(np.repeat(first - starts[:-1], counts) + np.arange(starts[-1]), starts)


def runs_of(flags: Bools) -> list[tuple[int, int]]:
    """The runs [start, end) of set entries of `flags` [n], ascending."""
    padded = np.zeros(len(flags) + 2, dtype=np.bool_)
    padded[1:-1] = flags
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class Ragged(NamedTuple):
    """A ragged array of R requests. Request i has `values[starts[i] : starts[i + 1]]`.

    `values` [n] int64; `starts` [R + 1] int64 ascends from 0 to n. Kernels take it as it is.
    """

    values: Ints
    starts: Ints

    @classmethod
    def empty(cls, num_requests: int = 0) -> Ragged:
        """No numbers for each of `num_requests` requests."""
        return cls(np.empty(0, dtype=np.int64), np.zeros(num_requests + 1, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int] | Ints]) -> Ragged:
        """Concatenate: request i has the numbers `parts[i]`."""
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        starts = starts_of([len(array) for array in arrays])
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64), starts)

    def of(self, i: int) -> Ints:
        """A view of request `i`'s numbers."""
        return self.values[self.starts[i] : self.starts[i + 1]]

    def followed_by(self, other: Ragged) -> Ragged:
        """The numbers of these requests, then those of `other`'s."""
        starts = np.append(self.starts, self.starts[-1] + other.starts[1:])
        return Ragged(np.append(self.values, other.values), starts)

    def take(self, which: Ints) -> Ragged:
        """The numbers of the requests `which` [k], in that order."""
        first = self.starts[which]
        places = spans(first, self.starts[which + 1] - first)
        return Ragged(self.values[places.values], places.starts)

    @property
    def counts(self) -> Ints:
        """How many numbers each request has [R]."""
        counts: Ints = self.starts[1:] - self.starts[:-1]
        return counts
