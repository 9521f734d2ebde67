"""How many of the newest queries attend to a token more than to the mean token."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import Array, AttentionKind, register


@register
class AttentionHits(AttentionKind):
    """How many of the newest W probed queries q have r[q, t] of at least 1 / n_q.

    n_q is the number of live tokens that q can see. A query before t is not a hit.
    """

    name = "attention_hits"
    summary = "how many of the newest W queries gave it at least 1 / (tokens they could see)"
    queries = "window"
    linear = False
    keeps = "bool"

    def of_query(self, rows: Array) -> Array:
        num_rows, num_tokens = rows.shape[-2:]
        num_seen = namespace(rows).arange(
            num_tokens - num_rows + 1, num_tokens + 1, dtype=rows.dtype, device=rows.device
        )
        return rows * num_seen[:, None] >= 1

    def over_queries(self, given: Array) -> Array:
        xp = namespace(given)
        return xp.sum(given, axis=-2, dtype=xp.float32)
