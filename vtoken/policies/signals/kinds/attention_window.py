"""The mean attention of the newest queries."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import Array, AttentionKind, register


@register
class AttentionWindow(AttentionKind):
    """The mean of r[q, t] over the newest W probed queries; a query before t counts as 0."""

    name = "attention_window"
    summary = "mean attention over the newest W probed queries"
    queries = "window"

    def over_queries(self, given: Array) -> Array:
        return namespace(given).mean(given, axis=-2)
