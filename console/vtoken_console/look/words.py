"""The states of blocks and requests as words, in the order in which they are told.

Knows neither numpy nor widgets. What each means for a block of S slots stands beside it;
`cells.in_state` is the same as code.
"""

from __future__ import annotations

BLOCK_STATES: dict[str, str] = {
    "free": "held by no request",
    "live": "holds a live token",
    "dead": "a slot behind its last token excepted, some slot holds nothing live",
    "low": "at most half live: what a planning round empties first",
    "shared": "held by two requests or more",
    "hashed": "in the prefix cache: never written",
    "flight": "source or destination of a move of the newest step",
    "tail": "the block that its request appends to",
}
REQUEST_STATES = ("running", "waiting", "preempted")
