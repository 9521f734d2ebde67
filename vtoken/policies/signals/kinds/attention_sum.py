"""The sum of all attention that a token received."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import Array, AttentionKind, register


@register
class AttentionSum(AttentionKind):
    """The sum of r[q, t] over all probed queries."""

    name = "attention_sum"
    summary = "attention received from all probed queries"
    queries = "all"

    def over_queries(self, given: Array) -> Array:
        return namespace(given).sum(given, axis=-2)
