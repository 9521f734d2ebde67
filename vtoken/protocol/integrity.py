"""Invariant I1 by content: a relocation event changes no retained token's identity, K or V.

Paper 3.6 and 5: the ordered ids of a request's retained tokens and their K/V over all layers are
hashed before the copies and after them. Knows bytes and slots, not where they come from.

1. ids before = ids after, in order: none lost, none doubled
2. every slot after lies in a block of the request, and no two tokens share one
3. digest(K, V of every layer) before = after
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from vtoken.arrays import Ints

DIGEST_BYTES = 16
LayerBytes = tuple[Any, Any]  # K and V of one layer, contiguous buffers


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The ordered `ids` [n] of one request's retained tokens, and one digest a layer."""

    ids: Ints
    layers: tuple[bytes, ...]


def fingerprint(ids: Ints, layers: Iterable[LayerBytes]) -> Fingerprint:
    """`layers` yields K and V of the tokens `ids`, in their order, layer by layer."""
    digests = []
    for key, value in layers:
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        digest.update(value)
        digests.append(digest.digest())
    return Fingerprint(ids, tuple(digests))


def misplaced(slots: Ints, blocks: Sequence[int], block_size: int) -> str | None:
    """What is wrong with `slots` [n] as places of distinct live tokens in `blocks`; None: nothing.

    `slots` -1: the token has no place.
    """
    strays = slots[~np.isin(slots // block_size, np.asarray(blocks, dtype=np.int64))]
    if len(strays):
        return f"slot {strays[0]} lies in none of the request's blocks"
    if len(np.unique(slots)) != len(slots):
        return f"{len(slots)} live tokens have {len(np.unique(slots))} slots"
    return None


def difference(before: Fingerprint, after: Fingerprint) -> str | None:
    """What a relocation changed though it must not; None: nothing."""
    if not np.array_equal(before.ids, after.ids):
        lost = np.setdiff1d(before.ids, after.ids)
        new = np.setdiff1d(after.ids, before.ids)
        return (
            f"{len(before.ids)} tokens were retained, {len(after.ids)} are; "
            f"{len(lost)} lost {lost[:4].tolist()}, {len(new)} new {new[:4].tolist()}"
        )
    layers = zip(before.layers, after.layers, strict=True)
    wrong = [number for number, (old, new) in enumerate(layers) if old != new]
    if wrong:
        return f"K/V of {len(before.ids)} retained tokens changed, first in layer {wrong[0]}"
    return None


def order_dependence(source: Ints, destination: Ints) -> str | None:
    """Why the copies `source` [k] -> `destination` [k] depend on their order; None: they do not."""
    if len(destination) == 0:
        return None
    writes = np.arange(1, len(destination) + 1, dtype=np.int32)
    last = np.zeros(1 + int(max(source.max(), destination.max())), dtype=np.int32)  # write, a slot
    last[destination] = writes
    both = int(np.count_nonzero(last[source]))
    twice = int(np.count_nonzero(last[destination] != writes))
    if both or twice:
        return f"reads and writes {both} slots, and writes {twice} more than once"
    return None
