"""Invariant I1 by content: a relocation event changes no retained token's identity, K or V.

Paper 3.6 and 5: the ordered ids of a request's retained tokens and their K/V over all layers are
hashed before and after the copies. Works on bytes and slots only.

1. ids before = ids after, in order: none lost, none duplicated
2. every slot after is in a block of the request, and no two tokens share one
3. digest(K, V of every layer) before = after
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.base.arrays import Ints
from vtoken.base.compiled import kernel

DIGEST_BYTES = 16
Bytes = npt.NDArray[np.uint8]
LayerBytes = tuple[Any, Any]  # K and V of one layer, contiguous buffers


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The ordered `ids` [n] of one request's retained tokens, and one digest per layer."""

    ids: Ints
    layers: tuple[bytes, ...]


def fingerprint(ids: Ints, layers: Iterable[LayerBytes]) -> Fingerprint:
    """Hash K and V of the tokens `ids`, which `layers` yields in their order, layer by layer."""
    digests = []
    for key, value in layers:
        digest = blake2b(key, digest_size=DIGEST_BYTES)
        digest.update(value)
        digests.append(digest.digest())
    return Fingerprint(ids, tuple(digests))


def token_digests(layers: Iterable[LayerBytes], num_tokens: int) -> list[bytes]:
    """Hash K and V of each of `num_tokens` tokens, which `layers` yields in their order."""
    digests = [blake2b(digest_size=DIGEST_BYTES) for _ in range(num_tokens)]
    for layer in layers:
        for part in layer:
            rows = np.frombuffer(part, dtype=np.uint8).reshape(num_tokens, -1)
            for digest, row in zip(digests, rows, strict=True):
                digest.update(row.data)
    return [digest.digest() for digest in digests]


def misplaced(slots: Ints, blocks: Sequence[int] | Ints, block_size: int) -> str | None:
    """Describe why `slots` [n] cannot hold distinct live tokens in `blocks`; None if they can.

    Slot -1: the token has no slot.
    """
    strays = slots[~np.isin(slots // block_size, np.asarray(blocks, dtype=np.int64))]
    if len(strays):
        return f"slot {strays[0]} is in none of the request's blocks"
    if len(np.unique(slots)) != len(slots):
        return f"{len(slots)} live tokens have {len(np.unique(slots))} slots"
    return None


def difference(before: Fingerprint, after: Fingerprint) -> str | None:
    """Describe what a relocation must not have changed but did; None if nothing."""
    if not np.array_equal(before.ids, after.ids):
        lost = np.setdiff1d(before.ids, after.ids)
        new = np.setdiff1d(after.ids, before.ids)
        return (
            f"{len(before.ids)} tokens retained before, {len(after.ids)} after: "
            f"{len(lost)} lost {lost[:4].tolist()}, {len(new)} new {new[:4].tolist()}"
        )
    layers = zip(before.layers, after.layers, strict=True)
    wrong = [number for number, (old, new) in enumerate(layers) if old != new]
    if wrong:
        return f"K/V of {len(before.ids)} retained tokens changed, first in layer {wrong[0]}"
    return None


@kernel
def _count_overlaps(source: Ints, destination: Ints, marks: Bytes) -> tuple[int, int]:
    """|{i : source[i] is in destination}| and |{i : destination[i] is in destination[:i]}|.

    `marks`: by slot, 0 before and after.
    """
    both = twice = 0
    for slot in destination:
        twice += marks[slot]
        marks[slot] = 1
    for slot in source:
        both += marks[slot]
    for slot in destination:
        marks[slot] = 0
    return both, twice


def order_dependence(source: Ints, destination: Ints, marks: Bytes) -> str | None:
    """Describe why the copies `source` [k] -> `destination` [k] depend on their order; None if not.

    Takes O(k) time. `marks` [number of slots] is scratch, 0 before and after.
    """
    both, twice = _count_overlaps(source, destination, marks)
    if both or twice:
        return f"reads and writes {both} slots, and writes {twice} more than once"
    return None
