"""The names of block and request states, in display order, and words for what holds blocks.

`cells.STATES` has which blocks are in a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vtoken.wire import CacheGroup

BLOCK_STATES = ("free", "live", "dead", "low", "shared", "cached", "moving", "filling", "other")
OTHERS: dict[str, str] = {"window": "window", "chunked": "chunk", "state": "state"}
REQUEST_STATES = ("running", "waiting", "idle", "preempted")


def other_words(groups: Iterable[CacheGroup]) -> str:
    """What holds blocks beside full attention: `window`, `window or state`; "" if nothing does."""
    return " or ".join(dict.fromkeys(OTHERS[g.kind] for g in groups if not g.managed))


def has_no_tokens(flags: int) -> bool:
    """Whether a block with these flags is neither free nor held for tokens of full attention."""
    from vtoken import wire

    return bool(flags & (wire.FLAG_OTHER | wire.FLAG_NULL))
