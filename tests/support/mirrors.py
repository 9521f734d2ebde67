"""Mirrors of requests that have evicted nothing."""

from __future__ import annotations

from collections.abc import Mapping

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import BlockTables, Mirrors


def mirrors_of(slots: Mapping[str, Ints]) -> Mirrors:
    """Mirrors of requests whose tokens 0, 1, … are live in the slots `slots[name]` [T]."""
    mirrors, tables = Mirrors(), BlockTables.of([*slots.values()])
    mirrors.place([*slots], tables.counts, 1, tables)  # blocks of one slot
    return mirrors
