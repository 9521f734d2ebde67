"""What a relocation makes of one request's places: a new block table, some tokens elsewhere.

Pure: the old arrays in, new ones out; nothing is changed, and a violation leaves nothing behind.
Knows neither the pool nor why tokens move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.arrays import Ints
from vtoken.errors import InvariantViolation
from vtoken.tables.places import ROOM_BLOCKS, Places


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """`index` [T] by token id; `fresh` blocks are new in the table, `dropped` ones have left it."""

    places: Places
    index: Ints
    fresh: list[int]
    dropped: list[int]


def _ranks(blocks: Ints, wanted: Ints, owner: str) -> Ints:
    """Where each of `wanted` [m] stands in `blocks` [n]; -1: nowhere."""
    order = np.argsort(blocks, kind="stable")
    ascending = blocks[order]
    if (ascending[1:] == ascending[:-1]).any():
        raise InvariantViolation("I2", f"new table of {owner} doubles a block")
    if len(blocks) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(ascending, wanted), len(blocks) - 1)
    return np.where(ascending[at] == wanted, order[at], -1)


def rebuild(
    places: Places, index: Ints, old: Ints, ids: Ints, slots: Ints, new: Ints, owner: str
) -> Rebuilt:
    """The live tokens `ids` [k] go to `slots` [k]; the block table `old` becomes `new`.

    `index` [T] by token id, -1: slot is gone. Raises InvariantViolation (I2) when a block is
    doubled, or a destination is outside `new`, doubled, or carries a live token. A live token that
    stays in a block that leaves is lost: the caller compares the counts.
    """
    s = places.block_size
    ranks = _ranks(new, np.concatenate([old, slots // s]), owner)
    new_rank, target_rank = ranks[: len(old)], ranks[len(old) :]
    if len(target_rank) and target_rank.min() < 0:
        outside = int(slots[int(target_rank.argmin())]) // s
        raise InvariantViolation("I2", f"destination {outside} is not in the table of {owner}")
    kept = new_rank >= 0
    is_fresh = np.ones(len(new), dtype=np.bool_)
    is_fresh[new_rank[kept]] = False

    size, room = len(old) * s, len(new) + ROOM_BLOCKS
    tokens = np.full(room * s, -1, dtype=np.int64)
    occupied = np.zeros(room * s, dtype=np.bool_)
    tokens.reshape(-1, s)[new_rank[kept]] = places.tokens[:size].reshape(-1, s)[kept]
    occupied.reshape(-1, s)[new_rank[kept]] = places.occupied[:size].reshape(-1, s)[kept]
    by_rank = np.append(new_rank, -1)[index // s]  # an index of -1 finds the -1 at the end
    moved = np.where(by_rank >= 0, by_rank * s + index % s, -1)

    target = target_rank * s + slots % s
    taken = np.zeros(len(occupied), dtype=np.bool_)
    taken[target] = True
    if np.count_nonzero(taken) != len(target) or occupied[target].any():
        raise InvariantViolation("I2", f"a destination of {owner} is doubled or holds a live token")
    left = moved[ids]
    left = left[left >= 0]
    tokens[left] = -1
    occupied[left] = False
    ghosts = tokens[target]
    moved[ghosts[ghosts >= 0]] = -1
    moved[ids] = target
    tokens[target] = ids
    occupied[target] = True
    return Rebuilt(
        Places.of(tokens, occupied, s), moved, new[is_fresh].tolist(), old[~kept].tolist()
    )
