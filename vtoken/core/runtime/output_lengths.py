"""How long outputs are: what the newest ended requests say about those that still run.

Clients often leave `max_tokens` open, and most outputs end before it. Independent of the engine.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.wire import MAX_TOKENS

NEWEST = 256
LEAST = 32  # lengths that must be known


class OutputLengths:
    """The lengths of the newest outputs, in tokens."""

    def __init__(self) -> None:
        self._newest: deque[int] = deque(maxlen=NEWEST)
        self._sorted: Ints = np.empty(0, dtype=np.int64)
        self._mean_from = self._sorted  # the mean of each and of those above it, rounded up

    def add(self, num_tokens: int) -> None:
        """An output of `num_tokens` tokens has ended."""
        self._newest.append(num_tokens)
        self._sorted = np.sort(np.fromiter(self._newest, dtype=np.int64))
        sums = np.cumsum(self._sorted[::-1])[::-1]
        self._mean_from = -(-sums // np.arange(len(sums), 0, -1))

    def expected_left(self, sampled: Ints) -> Ints:
        """How many more tokens an output that has `sampled` [k] tokens is expected to get [k]: as
        many as those that became longer got. `MAX_TOKENS` where none did, or too few have ended.

        Below 0, `sampled` counts tokens of the prompt that are yet to be computed.
        """
        left = np.full(len(sampled), MAX_TOKENS, dtype=np.int64)
        if len(self._sorted) < LEAST:
            return left
        first_longer = np.searchsorted(self._sorted, sampled, side="right")
        known = first_longer < len(self._sorted)
        left[known] = self._mean_from[first_longer[known]] - sampled[known]
        return left
