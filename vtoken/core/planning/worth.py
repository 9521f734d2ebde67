"""The worth of a round: the packing that it saves and the tokens that it moves, without a plan.

Pure estimate from columns of requests to counts, independent of tables and prices, in O(R). For a
request with n live tokens in b blocks of S slots, f of them full, with live tokens up to place E,
that evicts c tokens after `due_in` more steps:

1. holes h = E - n. Without holes the request is dense and none of it is packed
2. a plan must free a block (I4), so one exists only if b > n // S + 1
3. l = n - f S tokens of partial blocks are packed in every step while there is a hole
4. a round saves all of that until the next eviction, for t = due_in steps. Recycling fills one hole
   per step, before attention reads: then t <= h, and step i packs about l (h - i) / h tokens
5. later steps save a part. With recycling, h - t holes remain for about as many more steps, because
   new tokens fill the first hole and old holes concentrate in ever fewer blocks. Without recycling,
   all holes remain for about b steps, after which new evictions would have left most blocks partial
   anyway. The c new holes make a share min(1, c / b) of the blocks partial, which is subtracted, by
   half if holes are recycled. Steps beyond `MAX_STEPS` do not count
6. moved: about the tokens of the e = b - n // S - 1 emptiest blocks, at most e times the mean of
   the blocks that are not full and, if holes are filled (`plug`), at most h. `pack` copies all of l
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vtoken.base.arrays import Ints
from vtoken.base.compiled import kernel

MAX_STEPS = 64  # horizon of the estimate: the remaining length of a request is unknown


class RequestColumns(NamedTuple):
    """The requests that a round considers, [R] each: n, E, b, f, `due_in` and c, see above."""

    num_live: Ints
    extent: Ints
    num_blocks: Ints
    num_full: Ints
    due_in: Ints
    dying: Ints


class Estimate(NamedTuple):
    """The estimate of one round.

    `packed_tokens`: tokens times the steps in which a round now saves packing them. `loose_tokens`:
    tokens of partial blocks, packed in the next step without a round. `moved_tokens`: copied by the
    round, of `num_requests` requests.
    """

    packed_tokens: float
    loose_tokens: int
    moved_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Worth:
    """The expected saving and cost of a round now, in µs."""

    saving_us: float = 0.0
    cost_us: float = 0.0

    @property
    def pays(self) -> bool:
        return self.saving_us > self.cost_us


def estimate_round(
    columns: RequestColumns, block_size: int, *, recycles: bool, fills_holes: bool
) -> Estimate:
    """Estimate one round over `columns`; `fills_holes`: the planner is `plug`."""
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
    all_partial = all_moved = num_requests = 0
    for r in range(len(num_live)):
        live = num_live[r]
        holes = extent[r] - live
        excess = num_blocks[r] - (live // block_size + 1)
        partial = live - num_full[r] * block_size
        if holes <= 0 or excess <= 0 or partial <= 0:
            continue
        steps = min(due_in[r], MAX_STEPS)
        covered = min(1.0, dying[r] / num_blocks[r])
        if recycles:
            steps = min(steps, holes)
            packed += partial * (steps - steps * (steps + 1) / (2.0 * holes))
            left = holes - steps
            lasting = partial * (left / holes) * (1.0 - covered / 2)
        else:
            packed += partial * steps
            left = num_blocks[r]
            lasting = partial * (1.0 - covered)
        packed += lasting * min(left, MAX_STEPS - steps)
        moved = partial
        if fills_holes:
            not_full = num_blocks[r] - num_full[r]
            moved = min(partial, holes, -(-excess * partial // not_full))
        all_partial += partial
        all_moved += moved
        num_requests += 1
    return packed, all_partial, all_moved, num_requests
