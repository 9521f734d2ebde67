"""What a round is worth: the packing that it saves, the tokens that it moves. An estimate, no plan.

Pure: columns of requests in, counts out; knows neither tables nor prices. One pass over the
requests, in O(R). For a request with n live tokens in b blocks of S slots, f of them full, whose
live tokens reach up to place E, and which evicts c tokens after `due_in` more steps:

1. holes h = E - n. Without one the request is dense and nothing of it is packed
2. a plan must free a block (I4), so it exists only where b > n // S + 1; see `num_excess_blocks`
3. loose tokens l = n - f S are packed in every step while there is a hole
4. until the next eviction, for t = due_in steps, all of that is saved. Recycling fills one hole a
   step, before attention reads: then t <= h, and in step i about l (h - i) / h tokens are packed
5. holes that are left then go on: with recycling h - t of them, for about as many more steps,
   since new tokens fill the first hole and old holes gather in ever fewer blocks; without, all of
   them for about b steps, after which those who die have made most blocks loose anyway. From this
   goes the share of blocks that the c new holes make loose, min(1, c / b), on average half of the
   time where they are recycled. Nothing counts beyond `MAX_STEPS`
6. moved are about the tokens of the e = b - n // S - 1 emptiest blocks, at most e times the mean
   of the blocks with room, and where holes are filled (`plug`) at most h. `pack` copies all of l
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vtoken.arrays import Ints
from vtoken.compiled import kernel

MAX_STEPS = 64  # how far ahead a round may pay: nobody knows how long a request still runs


class RequestColumns(NamedTuple):
    """The requests that a round would look at, [R] each: n, E, b, f, `due_in` and c, see above."""

    num_live: Ints
    extent: Ints
    num_blocks: Ints
    num_full: Ints
    due_in: Ints
    dying: Ints


class Estimate(NamedTuple):
    """`packed_tokens`: loose tokens times the steps in which a round now would save packing them.

    `loose_tokens`: packed in the next step without a round. `moved_tokens`: what the round copies,
    of `num_requests` requests.
    """

    packed_tokens: float
    loose_tokens: int
    moved_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Worth:
    """What a round now is expected to save and to cost, in µs."""

    saving_us: float = 0.0
    cost_us: float = 0.0

    @property
    def pays(self) -> bool:
        return self.saving_us > self.cost_us


def estimate_round(
    columns: RequestColumns, block_size: int, *, recycles: bool, fills_holes: bool
) -> Estimate:
    """What one round over `columns` saves and moves; `fills_holes`: the planner is `plug`."""
    return Estimate(*_estimate(*columns, block_size, recycles, fills_holes))


@kernel
def _estimate(
    num_live: Ints,
    extent: Ints,
    num_blocks: Ints,
    num_full: Ints,
    due_in: Ints,
    dying: Ints,
    block_size: int,
    recycles: bool,
    fills_holes: bool,
) -> tuple[float, int, int, int]:
    packed = 0.0
    all_loose = all_moved = num_requests = 0
    for r in range(len(num_live)):
        live = num_live[r]
        holes = extent[r] - live
        excess = num_blocks[r] - (live // block_size + 1)
        loose = live - num_full[r] * block_size
        if holes <= 0 or excess <= 0 or loose <= 0:
            continue
        steps = min(due_in[r], MAX_STEPS)
        covered = min(1.0, dying[r] / num_blocks[r])
        if recycles:
            steps = min(steps, holes)
            packed += loose * (steps - steps * (steps + 1) / (2.0 * holes))
            left = holes - steps
            lasting = loose * (left / holes) * (1.0 - covered / 2)
        else:
            packed += loose * steps
            left = num_blocks[r]
            lasting = loose * (1.0 - covered)
        packed += lasting * min(left, MAX_STEPS - steps)
        moved = loose
        if fills_holes:
            with_room = num_blocks[r] - num_full[r]
            moved = min(loose, holes, -(-excess * loose // with_room))
        all_loose += loose
        all_moved += moved
        num_requests += 1
    return packed, all_loose, all_moved, num_requests
