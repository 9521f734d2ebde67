"""The norm of a token's key."""

from __future__ import annotations

from vtoken.base.arrays import namespace
from vtoken.policies.signals.kind import Array, KeyKind, register


@register
class KeyNorm(KeyKind):
    """-|k_t|."""

    name = "key_norm"
    summary = "minus the norm of its key"
    depth_percent = 60

    def numbers(self, values: Array) -> Array:
        return -namespace(values).linalg.vector_norm(values, axis=-1)
