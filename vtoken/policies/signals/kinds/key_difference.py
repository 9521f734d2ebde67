"""How much a token's key differs from the average key."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import Array, KeyKind, register


def unit(keys: Array) -> Array:
    """`keys` [..., D] of length 1; zero stays zero."""
    xp = namespace(keys)
    return keys / xp.clip(xp.linalg.vector_norm(keys, axis=-1, keepdims=True), 1e-12, None)


@register
class KeyDifference(KeyKind):
    """-cos(k_t, mean of k / |k| over the live tokens)."""

    name = "key_difference"
    summary = "minus the cosine of its key and the mean of the normalised keys"
    depth_percent = 47

    def numbers(self, values: Array) -> Array:
        xp, keys = namespace(values), unit(values)
        anchor = unit(xp.mean(keys, axis=-2, keepdims=True))
        return -xp.sum(keys * anchor, axis=-1)
