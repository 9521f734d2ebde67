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

import heapq
from typing import NamedTuple

import numpy as np

from vtoken.base.arrays import Ints


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

    def needed_blocks(self, live: Ints, block_size: int) -> Ints:
        """Blocks for `live` [k] tokens and those of the next step."""
        needed: Ints = (live + self.max_drafts) // block_size + 1
        return needed

    def most_blocks(self, block_size: int) -> Ints:
        """The most blocks that each request can give [k]."""
        needed = self.needed_blocks(self.live, block_size)
        spare = needed - self.needed_blocks(self.floor, block_size)
        most: Ints = np.clip(spare, 0, self.private_blocks)
        return most

    def kept(self, given_blocks: Ints, block_size: int) -> Ints:
        """The live tokens [k] that each request keeps when it gives so many whole blocks."""
        needed = self.needed_blocks(self.live, block_size) - given_blocks
        return np.where(given_blocks > 0, needed * block_size - 1 - self.max_drafts, self.live)


def share_out(givers: Givers, blocks: int, *, block_size: int) -> Ints:
    """The live tokens [k] that each request keeps so that `blocks` blocks are given, or all that
    there are. Equal to `givers.live` where a request gives nothing.
    """
    most = givers.most_blocks(block_size).tolist()
    needed = givers.needed_blocks(givers.live, block_size)
    tokens, priority = givers.tokens.tolist(), givers.priority.tolist()
    step = givers.step_blocks.tolist()
    remaining = givers.live - givers.forgotten
    obsolete = (needed - givers.needed_blocks(remaining, block_size)).tolist()
    given = [0] * len(most)

    def turn(i: int) -> tuple[bool, int, bool, float, int]:
        left, share = most[i] - given[i], (needed[i] - given[i]) / tokens[i]
        return given[i] >= obsolete[i], -priority[i], left < step[i], -share, i

    queue = [turn(i) for i in range(len(most)) if most[i]]
    heapq.heapify(queue)
    while blocks > 0 and queue:
        i = queue[0][-1]
        left = min(obsolete[i], most[i]) - given[i]
        gives = min(step[i], left if left > 0 else most[i] - given[i])
        given[i] += gives
        blocks -= gives
        if given[i] < most[i]:
            heapq.heapreplace(queue, turn(i))
        else:
            heapq.heappop(queue)
    return givers.kept(np.array(given, dtype=np.int64), block_size)
