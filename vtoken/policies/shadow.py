"""The shadow policy's tally: what it would have evicted, compared with what was evicted.

At each eviction the runtime also runs the shadow policy, under the same budget, and only counts its
choice. Counting restarts when a shadow is configured. A shadow that fails is not called again.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from vtoken.base.arrays import Ints
from vtoken.policies import Policy
from vtoken.wire import PolicyChoice, Shadow


class ShadowTally:
    """Counts agreement with the shadow. `active_policy`: the policy to call; None without
    one or after it failed.
    """

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self.active_policy: Policy | None = None
        self._counts = Shadow(policy=PolicyChoice(name="none", params={}))

    def set_policy(self, policy: Policy | None) -> None:
        """Set the configuration's shadow; another object than before restarts the counts."""
        if policy is not self._policy:
            self._policy = self.active_policy = policy
            if policy is not None:
                self._counts = Shadow(policy=policy.choice)

    def count(self, victims: Ints, chosen: Ints) -> None:
        """Count an eviction of `victims`; the shadow chose `chosen`. Neither has duplicates."""
        self._counts.compared += 1
        self._counts.victims += len(victims)
        self._counts.agreed += len(np.intersect1d(victims, chosen, assume_unique=True))

    def count_without_scores(self, number: int) -> None:
        """Count evictions for which the shadow had no scores yet."""
        self._counts.waiting += number

    def fail(self, error: Exception) -> None:
        self._counts.error, self.active_policy = repr(error), None

    def document(self) -> Shadow | None:
        return None if self._policy is None else structs.replace(self._counts)
