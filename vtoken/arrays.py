"""The array types of the core. The name of an argument says what its numbers are: `ids` are token
ids, `slots` places in the cache (`block_id * S + offset`), `blocks` block ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ragged:
    """One array for R requests: `values` [n] int64, of which `values[starts[i] : starts[i + 1]]`
    belong to request i; `starts` [R + 1] int64 ascends from 0 to n.
    """

    values: Ints
    starts: Ints

    @classmethod
    def empty(cls, num_requests: int = 0) -> Ragged:
        """Nothing for each of `num_requests` requests."""
        return cls(np.empty(0, dtype=np.int64), np.zeros(num_requests + 1, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int] | Ints]) -> Ragged:
        """The numbers of request i are `parts[i]`."""
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        starts = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=starts[1:])
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64), starts)

    def of(self, i: int) -> Ints:
        """The numbers of request `i`: a view."""
        return self.values[self.starts[i] : self.starts[i + 1]]

    def take(self, which: Ints) -> Ragged:
        """The numbers of the requests `which` [k], in that order."""
        first, counts = self.starts[which], self.starts[which + 1] - self.starts[which]
        starts = np.zeros(len(which) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        places = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
        return Ragged(self.values[places], starts)

    @property
    def counts(self) -> Ints:
        """How many numbers each request has [R]."""
        counts: Ints = self.starts[1:] - self.starts[:-1]
        return counts
