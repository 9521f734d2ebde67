"""Wasted moves: tokens that die soon after they were relocated.

Independent of tables and policies. Stored per token, only for requests with relocated tokens, up to
the highest id relocated.
"""

from __future__ import annotations

import numpy as np

from vtoken.base.arrays import Ints

WASTED_WITHIN_STEPS = 64
NEVER = -(1 << 30)


class LastMoves:
    """The step of each token's newest move, for one request."""

    def __init__(self) -> None:
        self._steps: Ints = np.empty(0, dtype=np.int64)  # by id

    def moved(self, ids: Ints, step: int) -> None:
        """Record that tokens `ids` [n], in any order, are copied before the forward of `step`."""
        known, needed = len(self._steps), int(ids.max(initial=-1)) + 1
        if needed > known:
            steps = np.full(max(needed, 2 * known), NEVER, dtype=np.int64)
            steps[:known] = self._steps
            self._steps = steps
        self._steps[ids] = step

    def num_recent(self, ids: Ints, step: int) -> int:
        """How many of the tokens `ids` [n] were moved within `WASTED_WITHIN_STEPS` of `step`."""
        known = ids if int(ids.max(initial=-1)) < len(self._steps) else ids[ids < len(self._steps)]
        return int(np.count_nonzero(self._steps[known] >= step - WASTED_WITHIN_STEPS))
