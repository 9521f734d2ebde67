"""What a worker keeps of one request for a signal of keys whose anchor is of all tokens seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.policies.signals.kind import Array


@dataclass(slots=True)
class SeenKeys:
    """The anchors of a signal: sums over the tokens that were live at the first reading of it after
    they were computed. A token that comes back was counted then, or never is.

    `num_tokens`: the request's tokens at the newest reading, dead ones included. `anchors`: the sum
    [Hkv, D] float32 of `AnchoredKeyKind.summands` by the layer's index in the signal, over this
    rank's heads, on the cache's device. A reader adds the newest tokens, as many as `advance` says.
    """

    num_tokens: int = 0
    anchors: dict[int, Array] = field(default_factory=dict)

    def advance(self, ids: Ints, num_tokens: int) -> int:
        """Begin a reading of the live tokens `ids`, of `num_tokens`; how many of them are new."""
        num_new = len(ids) - int(np.searchsorted(ids, self.num_tokens))
        self.num_tokens = num_tokens
        return num_new
