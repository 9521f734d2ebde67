"""The names of block and request states, in display order, with their meaning for a block.

`cells.in_state` implements the block states.
"""

from __future__ import annotations

BLOCK_STATES: dict[str, str] = {
    "free": "held by no request",
    "live": "holds a live token",
    "dead": "some slot holds nothing live; the slots after a tail's last token do not count",
    "low": "at most half live: a planning round empties these first",
    "shared": "held by two requests or more",
    "hashed": "in the prefix cache: never written",
    "flight": "source or destination of a move of the newest step",
    "tail": "the block that its request appends to",
}
REQUEST_STATES = ("running", "waiting", "preempted")


def flag_words(flags: int) -> list[str]:
    """The names of a block's flags, those that pin it first."""
    from vtoken import wire  # here, to keep the first frame fast

    names = (
        (wire.FLAG_SHARED, "shared"),
        (wire.FLAG_HASHED, "hashed"),
        (wire.FLAG_IN_FLIGHT, "in flight"),
        (wire.FLAG_TAIL, "tail"),
    )
    return [word for bit, word in names if flags & bit]
