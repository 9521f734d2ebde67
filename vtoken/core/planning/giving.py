"""Who gives tokens when memory is short, and how many: water-filling over running requests.

Pure functions of columns, independent of policies and tables. A shortage is in blocks. A request
gives whole blocks: it is cut down to a number of live tokens that, with those of the next step,
fill its blocks, so that packing it returns every block that it gives.

1. blocks that forgotten tokens fill go before all others
2. requests of the least important priority give first (vLLM: the greatest number)
3. of these, whoever keeps the largest share of its tokens gives next, `step_blocks` at a time, so
   that requests become equal in the share that they keep
4. a request that has less than `step_blocks` left to give gives only after all others
5. no request is cut down below its floor
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Ints
from vtoken.base.compiled import kernel


@kernel
def _needed(live: int, max_drafts: int, size: int) -> int:
    """Blocks for `live` tokens and those of the next step."""
    return (live + max_drafts) // size + 1


@kernel
def count_most(givers: Givers, size: int, out: Ints) -> None:
    """Write the most blocks that each request can give to `out` [k]."""
    for i in range(len(out)):
        spare = _needed(givers.live[i], givers.max_drafts, size)
        spare -= _needed(givers.floor[i], givers.max_drafts, size)
        out[i] = min(max(spare, 0), givers.private_blocks[i])


@kernel
def take_turns(givers: Givers, size: int, blocks: int, out: Ints) -> None:
    """Write the live tokens that each request keeps to `out` [k], see `share_out`."""
    k = len(out)
    most, given, obsolete = np.empty(k, np.int64), np.zeros(k, np.int64), np.empty(k, np.int64)
    count_most(givers, size, most)
    for i in range(k):
        remaining = givers.live[i] - givers.forgotten[i]
        obsolete[i] = _needed(givers.live[i], givers.max_drafts, size)
        obsolete[i] -= _needed(remaining, givers.max_drafts, size)
    while blocks > 0:
        first, first_turn = -1, (0.0, 0.0, 0.0, 0.0)
        for i in range(k):
            left = most[i] - given[i]
            held = _needed(givers.live[i], givers.max_drafts, size) - given[i]
            turn = (
                1.0 * (given[i] >= obsolete[i]),
                -1.0 * givers.priority[i],
                1.0 * (left < givers.step_blocks[i]),
                -held / givers.tokens[i],
            )
            if left and (first < 0 or turn < first_turn):
                first, first_turn = i, turn
        if first < 0:
            break
        left = min(obsolete[first], most[first]) - given[first]
        if left <= 0:
            left = most[first] - given[first]
        gives = min(givers.step_blocks[first], left)
        given[first] += gives
        blocks -= gives
    for i in range(k):
        out[i] = givers.live[i]
        if given[i]:
            held = _needed(givers.live[i], givers.max_drafts, size) - given[i]
            out[i] = held * size - 1 - givers.max_drafts


class Givers(NamedTuple):
    """The requests that may give, [k] each.

    `live` and `tokens`: live tokens, and all tokens ever computed. `floor`: the fewest live tokens.
    `private_blocks`: held blocks that nobody else holds. `priority`: vLLM's, lower is more
    important. `step_blocks`: how many blocks each gives at a time. `forgotten`: the live tokens
    that die before all others. `max_drafts`: the most drafts of each in a step.
    """

    live: Ints
    tokens: Ints
    floor: Ints
    private_blocks: Ints
    priority: Ints
    step_blocks: Ints
    forgotten: Ints
    max_drafts: int = 0

    def most_blocks(self, block_size: int) -> Ints:
        """The most blocks that each request can give [k]."""
        most = np.empty(len(self.live), dtype=np.int64)
        count_most(self, block_size, most)
        return most


def share_out(givers: Givers, blocks: int, *, block_size: int) -> Ints:
    """The live tokens [k] that each request keeps so that `blocks` blocks are given, or all that
    there are. Equal to `givers.live` where a request gives nothing.
    """
    kept = np.empty(len(givers.live), dtype=np.int64)
    take_turns(givers, block_size, blocks, kept)
    return kept
