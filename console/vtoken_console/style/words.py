"""The names of block and request states, in display order, with their meaning for a block.

`cells.in_state` implements the block states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vtoken.wire import CacheGroup

BLOCK_STATES: dict[str, str] = {
    "free": "held by no request",
    "live": "holds a live token",
    "dead": "some slot holds nothing live; the slots after a tail's last token do not count",
    "low": "at most half live: a planning round empties these first",
    "shared": "held by two requests or more",
    "cached": "in the prefix cache: never written",
    "moving": "source or destination of a move of the newest step",
    "filling": "the block that its request appends to",
    "other": "held by layers with a window, chunks or a state: no policy evicts these",
}
OTHERS: dict[str, str] = {"window": "window", "chunked": "chunk", "state": "state"}
REQUEST_STATES = ("running", "waiting", "idle", "preempted")


def other_words(groups: Iterable[CacheGroup]) -> str:
    """What holds blocks beside full attention: `window`, `window or state`; "" if nothing does."""
    return " or ".join(dict.fromkeys(OTHERS[g.kind] for g in groups if not g.managed))


def has_no_tokens(flags: int) -> bool:
    """Whether a block with these flags is neither free nor held for tokens of full attention."""
    from vtoken import wire

    return bool(flags & (wire.FLAG_OTHER | wire.FLAG_NULL))
