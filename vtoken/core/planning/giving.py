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
from vtoken.core.planning.engine_shape import EngineShape


class Givers(NamedTuple):
    """The requests that may give, [k] each.

    `live` and `tokens`: live tokens, and all tokens ever computed. `floor`: the fewest live tokens.
    `private_blocks`: held blocks that nobody else holds. `priority`: vLLM's, lower is more
    important. `step_blocks`: how many blocks each gives at a time. `forgotten`: the live tokens
    that die before all others.
    """

    live: Ints
    tokens: Ints
    floor: Ints
    private_blocks: Ints
    priority: Ints
    step_blocks: Ints
    forgotten: Ints
    shape: EngineShape

    def most_blocks(self) -> Ints:
        """The most blocks that each request can give [k]."""
        needed = self.shape.needed_blocks
        spare = needed(self.live) - needed(self.floor)
        most: Ints = np.minimum(np.maximum(spare, 0), self.private_blocks)
        return most


def share_out(givers: Givers, blocks: int) -> Ints:
    """The live tokens [k] that each request keeps so that `blocks` blocks are given, or all that
    there are. Equal to `givers.live` where a request gives nothing.
    """
    shape = givers.shape
    needed = shape.needed_blocks(givers.live)
    obsolete = needed - shape.needed_blocks(givers.live - givers.forgotten)
    given = np.zeros_like(needed)
    _take_turns(
        givers.tokens,
        givers.priority,
        givers.step_blocks,
        needed,
        givers.most_blocks(),
        obsolete,
        blocks,
        given,
    )
    kept = (needed - given) * shape.block_size - shape.next_places
    return np.where(given > 0, kept, givers.live)


@kernel
def _take_turns(
    tokens: Ints,
    priority: Ints,
    step_blocks: Ints,
    needed: Ints,
    most: Ints,
    obsolete: Ints,
    blocks: int,
    given: Ints,
) -> None:
    """Write the blocks that each request gives to `given` [k], 0 before.

    `most`: those that it can give; `obsolete`: those that its forgotten tokens fill.
    """
    while blocks > 0:
        first, first_turn = -1, (0.0, 0.0, 0.0, 0.0)
        for i in range(len(given)):
            left = most[i] - given[i]
            turn = (
                1.0 * (given[i] >= obsolete[i]),
                -1.0 * priority[i],
                1.0 * (left < step_blocks[i]),
                -(needed[i] - given[i]) / tokens[i],
            )
            if left and (first < 0 or turn < first_turn):
                first, first_turn = i, turn
        if first < 0:
            break
        left = min(obsolete[first], most[first]) - given[first]
        if left <= 0:
            left = most[first] - given[first]
        gives = min(step_blocks[first], left)
        given[first] += gives
        blocks -= gives
