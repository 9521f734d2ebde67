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

from vtoken.base.arrays import Ints
from vtoken.base.compiled import kernel

DIGEST_BYTES = 16
WORD = 32  # slots per word of a slot set
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
def _word_of(words: Ints, slot: int) -> int:
    """The index of `slot`'s word in the open-addressed hash table `words` [2^m], or a free index
    (-1 in `words`) for it."""
    word = slot // WORD
    i = ((word & 0x7FFFFFFF) * 0x9E3779B) & (len(words) - 1)
    while words[i] >= 0 and words[i] != word:
        i = (i + 1) & (len(words) - 1)
    return i


@kernel
def _count_overlaps(source: Ints, destination: Ints) -> tuple[int, int]:
    """|{i : source[i] is in destination}| and |{i : destination[i] is in destination[:i]}|.

    The set of slots >= 0 is a bitmap of `WORD`-bit words; neighbouring slots reuse the last lookup.
    """
    num_words, size = 1, 2
    for i in range(1, len(destination)):
        num_words += 1 if destination[i] // WORD != destination[i - 1] // WORD else 0
    while size < 2 * num_words:
        size *= 2
    words = np.full(size, -1, dtype=np.int64)
    bits = np.zeros(size, dtype=np.int64)
    both, twice, at = 0, 0, 0
    for slot in destination:
        if words[at] != slot // WORD:
            at = _word_of(words, slot)
            words[at] = slot // WORD
        bit = 1 << (slot % WORD)
        twice += 1 if bits[at] & bit else 0
        bits[at] |= bit
    for slot in source:
        if words[at] != slot // WORD:
            at = _word_of(words, slot)
        if words[at] >= 0 and bits[at] & (1 << (slot % WORD)):
            both += 1
    return both, twice


def order_dependence(source: Ints, destination: Ints) -> str | None:
    """Describe why the copies `source` [k] -> `destination` [k] depend on their order; None if not.

    Takes O(k) time, independent of the pool's size.
    """
    both, twice = _count_overlaps(source, destination)
    if both or twice:
        return f"reads and writes {both} slots, and writes {twice} more than once"
    return None
