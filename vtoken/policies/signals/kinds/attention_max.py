"""The greatest attention of one of the newest queries."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import Array, AttentionKind, register


@register
class AttentionMax(AttentionKind):
    """The maximum of r[q, t] over the newest W probed queries."""

    name = "attention_max"
    summary = "maximum attention over the newest W probed queries"
    queries = "window"
    linear = False

    def over_queries(self, given: Array) -> Array:
        return namespace(given).amax(given, axis=-2)
