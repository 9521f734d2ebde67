"""The attention of the newest query."""

from __future__ import annotations

from vtoken.policies.signals.kind import Array, AttentionKind, register


@register
class AttentionLast(AttentionKind):
    """r[q, t] of the newest probed query q."""

    name = "attention_last"
    summary = "attention received from the newest probed query"
    queries = "newest"

    def over_queries(self, given: Array) -> Array:
        return given[..., -1, :]
