"""The shadow policy's tally: what it would have evicted, beside what died.

Knows neither tables nor who asks it. A shadow is asked once at each eviction, under the same
budget, and never obeyed. Its numbers begin when it is chosen; once it fails it is not asked again.
"""

from __future__ import annotations

import numpy as np

from vtoken.arrays import Ints
from vtoken.policies import Policy, params_dict
from vtoken.wire import PolicyChoice, Shadow


class ShadowTally:
    """`asked`: the policy that may be asked now; None where there is no shadow, or it failed."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self.asked: Policy | None = None
        self._compared = self._victims = self._agreed = self._waiting = 0
        self._error: str | None = None

    def follow(self, policy: Policy | None) -> None:
        """The configuration's shadow; one that is not the same object begins from nothing."""
        if policy is not self._policy:
            self._policy = self.asked = policy
            self._compared = self._victims = self._agreed = self._waiting = 0
            self._error = None

    def count(self, victims: Ints, chosen: Ints) -> None:
        """`victims` die, the shadow would have evicted `chosen`; both without duplicates."""
        self._compared += 1
        self._victims += len(victims)
        self._agreed += len(np.intersect1d(victims, chosen, assume_unique=True))

    def wait(self) -> None:
        """An eviction where the shadow could not say."""
        self._waiting += 1

    def fail(self, error: Exception) -> None:
        self._error, self.asked = repr(error), None

    def document(self) -> Shadow | None:
        policy = self._policy
        if policy is None:
            return None
        return Shadow(
            policy=PolicyChoice(name=policy.name, params=params_dict(policy)),
            compared=self._compared,
            victims=self._victims,
            agreed=self._agreed,
            waiting=self._waiting,
            error=self._error,
        )
