"""Signals: one number a live token, higher = keep, that policies rank by.

Importing this package registers the built-in kinds.
"""

from vtoken.base.arrays import namespace
from vtoken.policies.signals import kinds  # noqa: F401  (registers them)
from vtoken.policies.signals.accumulators import (
    Accumulator,
    Change,
    by_id,
)
from vtoken.policies.signals.kind import (
    WARM_QUERIES,
    AnchoredKeyKind,
    Array,
    AttentionKind,
    KeyKind,
    Kind,
    broken_kinds,
    kind_of,
)
from vtoken.policies.signals.neighbours import SIMILAR, pooled, redundancy
from vtoken.policies.signals.seen import SeenKeys
from vtoken.policies.signals.signal import Aggregate, Anchor, Signal

__all__ = [
    "SIMILAR",
    "WARM_QUERIES",
    "Accumulator",
    "Aggregate",
    "Anchor",
    "AnchoredKeyKind",
    "Array",
    "AttentionKind",
    "Change",
    "KeyKind",
    "Kind",
    "SeenKeys",
    "Signal",
    "broken_kinds",
    "by_id",
    "kind_of",
    "namespace",
    "pooled",
    "redundancy",
]
