"""How much a token's key differs from the average key."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import AnchoredKeyKind, Array, register


def unit(keys: Array) -> Array:
    """`keys` [..., D] of length 1; zero stays zero."""
    xp = namespace(keys)
    return keys / xp.clip(xp.linalg.vector_norm(keys, axis=-1, keepdims=True), 1e-12, None)


@register
class KeyDifference(AnchoredKeyKind):
    """-cos(k_t, mean of k / |k| over the tokens of the anchor)."""

    name = "key_difference"
    summary = "minus the cosine of its key and the mean of the normalised keys"
    depth_percent = 47

    def summands(self, keys: Array) -> Array:
        return unit(keys)

    def against(self, keys: Array, anchor: Array) -> Array:
        return -namespace(keys).sum(unit(keys) * unit(anchor)[..., None, :], axis=-1)
