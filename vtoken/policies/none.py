"""No eviction: the runtime is idle, and the server's output is that of stock vLLM."""

from __future__ import annotations

import numpy as np

from vtoken.policies.base import Policy, register
from vtoken.policies.view import TokenIds, View


@register
class NoEviction(Policy):
    name = "none"
    summary = "evict nothing; the native variant"

    def select_victims(self, view: View) -> TokenIds:  # noqa: ARG002
        return np.empty(0, dtype=np.int64)
