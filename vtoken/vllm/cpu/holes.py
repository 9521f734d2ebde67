"""Exact attention over requests with holes, with the stock kernel: the loose tokens are packed.

A token is loose when its block is not full of live tokens. Attention over a cache is a sum over
slots, and positions are already in K, so the order of what is read is free. Two ways, layer by
layer, each with one kernel call a layer for all requests:

- *lent*: free blocks of the pool, lent for this step, take the loose tokens; attention reads the
  full blocks where they lie, and the lent ones behind them. One attention call for the batch. What
  an earlier step packed into a block that is lent again is not copied again, see `PackedSlots`.
- *apart*: when too few blocks are free, the request's full blocks are copied and its loose tokens
  packed into scratch blocks outside the pool, and attention reads those in a call of its own.
  A chunk of several new tokens goes this way too, its own tokens last and in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vtoken.arrays import Ints, Ragged
from vtoken.compiled import kernel
from vtoken.vllm.cpu.layout import Bits, KVLayout

Table = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int32]
NO_BLOCKS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LentRequests:
    """Requests that were lent blocks. `rows` [r] of the batch; a part each of the full blocks, read
    as they lie, of the slots of loose tokens, and of the `lent` blocks that those are packed into.
    """

    rows: Ints
    full_blocks: Ragged
    loose_slots: Ragged
    lent: Ragged


@dataclass(frozen=True, slots=True)
class ApartRequests:
    """Requests that are read apart. `rows` [r] of the batch; the `slots` of live tokens by id, of
    which the last `num_new` [r] are new.
    """

    rows: Ints
    slots: Ragged
    num_new: Ints


@dataclass(frozen=True, slots=True)
class Moves:
    """Whole blocks `full_from` [f] -> `full_to` [f], and tokens `source` [t] -> `target` [t]."""

    full_from: Ints
    full_to: Ints
    source: Ints
    target: Ints

    def copy(self, cache: torch.Tensor, packed: torch.Tensor, layout: KVLayout) -> None:
        """Copy K and V from `cache` to `packed`, both [N, H, S, 2D]; they may be the same."""
        if not len(self.source) and not len(self.full_from):
            return
        read, written = layout.memory(cache), layout.memory(packed)
        pack(
            read.bits,
            read.shape,
            written.bits,
            written.shape,
            self.full_from,
            self.full_to,
            self.source,
            self.target,
        )


class PackedSlots:
    """What lent blocks still hold of earlier steps, slot by slot of the pool's cache.

    1. packed_at[s] = t if and only if source_of[t] = s; -1 where there is none
    2. then slots s and t hold the same K and V, in every layer
    3. `written(slots)` comes after every write to the cache but the packing itself, and before the
       next `plan`; a step whose writes are not known calls `forget`
    4. what was planned but not copied in all of `num_layers` layers is forgotten
    """

    def __init__(self, num_blocks: int, block_size: int, num_layers: int) -> None:
        self._num_layers = num_layers
        self._block_size = block_size
        self._num_copied = num_layers
        self.packed_at: Slots = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self.source_of: Slots = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self._index = np.full(num_blocks, -1, dtype=np.int64)
        self._any = False

    def forget(self) -> None:
        if self._any:
            self.packed_at.fill(-1)
            self.source_of.fill(-1)
            self._any = False

    def written(self, slots: Ints) -> None:
        """`slots` [k] have new contents; negative ones are nobody's."""
        if self._any:
            unlink(slots, self.packed_at, self.source_of)

    def plan(self, requests: LentRequests, table: Table) -> Moves:
        """What to copy in each layer, and the block table rows in `table` [R, m], in place.

        Raises ValueError when the lent blocks are too few, IndexError for a block or slot that the
        cache does not have.
        """
        if self._num_copied != self._num_layers:
            self.forget()
        loose = requests.loose_slots
        source, target = np.empty_like(loose.values), np.empty_like(loose.values)
        done = plan_lent(
            requests.rows,
            requests.full_blocks.values,
            requests.full_blocks.starts,
            loose.values,
            loose.starts,
            requests.lent.values,
            requests.lent.starts,
            self._block_size,
            self._index,
            self.packed_at,
            self.source_of,
            table,
            source,
            target,
        )
        if done < 0:
            self._index.fill(-1)
            self._any = True
            self.forget()
            raise _unplanned(requests, -1 - done, len(self._index), self._block_size)
        self._any, self._num_copied = True, 0
        return Moves(NO_BLOCKS, NO_BLOCKS, source[:done], target[:done])

    def copied(self) -> None:
        """The planned copies are made in one more layer."""
        self._num_copied += 1


def _unplanned(requests: LentRequests, r: int, num_blocks: int, block_size: int) -> Exception:
    lent, loose = (
        int(part.starts[r + 1] - part.starts[r]) for part in (requests.lent, requests.loose_slots)
    )
    if loose > lent * block_size:
        return ValueError(f"{loose} loose tokens do not fit {lent} lent blocks")
    return IndexError(f"a packed request has a block outside of the {num_blocks} of the cache")


@dataclass(frozen=True, slots=True)
class Apart:
    """Packing into `num_blocks` scratch blocks, read through `block_table` [r, m] int32.

    `seq_lens` [r] int32.
    """

    moves: Moves
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_blocks: int


def plan_apart(requests: ApartRequests, num_blocks: int, block_size: int) -> Apart:
    """The packing of requests that are read apart from the pool of `num_blocks` blocks.

    Raises IndexError for a slot that the pool does not have.
    """
    slots, starts = requests.slots.values, requests.slots.starts
    lengths = np.diff(starts)
    counts = -(-lengths // block_size)
    table: Table = np.zeros((len(lengths), int(counts.max())), dtype=np.int32)
    full_from, full_to = (np.empty(int(counts.sum()), dtype=np.int64) for _ in range(2))
    source, target = np.empty_like(slots), np.empty_like(slots)
    num_full, num_moves = place_apart(
        slots,
        starts,
        requests.num_new,
        block_size,
        np.zeros(num_blocks, dtype=np.int64),
        full_from,
        full_to,
        source,
        target,
        table,
    )
    if num_full < 0:
        raise IndexError(f"slot {slots[num_moves]} is not in a cache of {num_blocks} blocks")
    return Apart(
        Moves(full_from[:num_full], full_to[:num_full], source[:num_moves], target[:num_moves]),
        torch.from_numpy(table),
        torch.from_numpy(lengths.astype(np.int32)),
        int(counts.sum()),
    )


def split_loose(slots: Ints, block_size: int) -> tuple[Ints, Ints]:
    """Full blocks, and the slots of loose tokens, of a request whose live tokens are at `slots`."""
    blocks, counts = np.unique(slots // block_size, return_counts=True)
    full = blocks[counts == block_size]
    return full, slots[~np.isin(slots // block_size, full)]


@kernel
def unlink(slots: Ints, packed_at: Slots, source_of: Slots) -> None:
    """No slot of `slots` is a copy or has one any more; negative ones are passed over."""
    for i in range(len(slots)):
        if slots[i] >= 0:
            unlink_one(slots[i], packed_at, source_of)


@kernel
def unlink_one(slot: int, packed_at: Slots, source_of: Slots) -> None:
    if packed_at[slot] >= 0:
        source_of[packed_at[slot]] = -1
        packed_at[slot] = -1
    if source_of[slot] >= 0:
        packed_at[source_of[slot]] = -1
        source_of[slot] = -1


@kernel
def plan_lent(
    rows: Ints,
    full: Ints,
    full_starts: Ints,
    loose: Ints,
    loose_starts: Ints,
    lent: Ints,
    lent_starts: Ints,
    block_size: int,
    index: Ints,
    packed_at: Slots,
    source_of: Slots,
    table: Table,
    source: Ints,
    target: Ints,
) -> int:
    """Where the loose tokens go; how many moves that takes, or -1 - r for a request r that is bad.

    The l loose tokens of a request fill the first l slots of its lent blocks, in any order. A token
    that is there already stays; the others take what is left, in order. `index` [N] holds -1,
    before and, where nothing is bad, after.
    """
    num_blocks, moves = len(index), 0
    taken = np.zeros(len(lent) * block_size, dtype=np.bool_)
    for r in range(len(rows)):
        first, num_lent = lent_starts[r], lent_starts[r + 1] - lent_starts[r]
        num_full = full_starts[r + 1] - full_starts[r]
        num_loose = loose_starts[r + 1] - loose_starts[r]
        if num_loose > num_lent * block_size or num_full + num_lent > table.shape[1]:
            return -1 - r
        for i in range(num_full):
            table[rows[r], i] = full[full_starts[r] + i]
        for i in range(num_lent):
            block = lent[first + i]
            if block < 0 or block >= num_blocks:
                return -1 - r
            table[rows[r], num_full + i] = block
            index[block] = i
        taken[:num_loose] = False
        start = moves
        for j in range(loose_starts[r], loose_starts[r + 1]):
            slot = loose[j]
            if slot < 0 or slot >= num_blocks * block_size:
                return -1 - r
            place, there = -1, packed_at[slot]
            if there >= 0 and index[there // block_size] >= 0:
                place = index[there // block_size] * block_size + there % block_size
            if 0 <= place < num_loose:
                taken[place] = True
            else:
                source[moves] = slot
                moves += 1
        place = 0
        for move in range(start, moves):
            while taken[place]:
                place += 1
            slot, to = source[move], lent[first + place // block_size] * block_size
            to += place % block_size
            place += 1
            unlink_one(slot, packed_at, source_of)
            unlink_one(to, packed_at, source_of)
            packed_at[slot], source_of[to] = to, slot
            target[move] = to
        for i in range(num_lent):
            index[lent[first + i]] = -1
    return moves


@kernel
def place_apart(
    slots: Ints,
    starts: Ints,
    num_new: Ints,
    block_size: int,
    counts: Ints,
    full_from: Ints,
    full_to: Ints,
    source: Ints,
    target: Ints,
    table: Table,
) -> tuple[int, int]:
    """Full blocks first, then loose tokens in order, each request in scratch blocks of its own.

    Of several new tokens all are loose, and last. `counts` [N] holds 0. Returns the numbers of full
    blocks and of loose tokens; or -1 and the position of a slot that no block of N holds.

        blocks of a request = ceil(its tokens / S), full ones at the front
    """
    num_full, num_moves, next_block = 0, 0, 0
    for r in range(len(starts) - 1):
        first, end = starts[r], starts[r + 1]
        old = end if num_new[r] == 1 else end - num_new[r]
        for j in range(first, end):
            if slots[j] < 0 or slots[j] >= len(counts) * block_size:
                return -1, j
        for j in range(first, old):
            counts[slots[j] // block_size] += 1
        begin = num_full
        for j in range(first, old):
            block = slots[j] // block_size
            if counts[block] == block_size:
                full_from[num_full] = block
                full_to[num_full] = next_block + num_full - begin
                num_full += 1
                counts[block] = -1  # its tokens are not loose
        to = (next_block + num_full - begin) * block_size
        for j in range(first, end):
            if j >= old or counts[slots[j] // block_size] >= 0:
                source[num_moves] = slots[j]
                target[num_moves] = to
                num_moves += 1
                to += 1
        for j in range(first, old):
            counts[slots[j] // block_size] = 0
        num_blocks = (end - first + block_size - 1) // block_size
        for i in range(num_blocks):
            table[r, i] = next_block + i
        next_block += num_blocks
    return num_full, num_moves


@kernel
def pack(
    source: Bits,
    source_shape: Ints,
    target: Bits,
    target_shape: Ints,
    full_from: Ints,
    full_to: Ints,
    from_slots: Ints,
    to_slots: Ints,
) -> None:
    """Copy whole blocks, then tokens, from one cache to another or within one; see `Memory`."""
    heads, block_size, head_size = source_shape[1], source_shape[2], source_shape[3]
    size = 2 * block_size * head_size
    for i in range(len(full_from)):
        for h in range(heads):
            read = full_from[i] * source_shape[4] + h * source_shape[5]
            written = full_to[i] * target_shape[4] + h * target_shape[5]
            target[written : written + size] = source[read : read + size]
    for i in range(len(from_slots)):
        read = from_slots[i] // block_size * source_shape[4]
        written = to_slots[i] // block_size * target_shape[4]
        offset, to = from_slots[i] % block_size, to_slots[i] % block_size
        for _ in range(heads):
            for part in (6, 9):
                a = read + source_shape[part] + offset * source_shape[part + 1]
                b = written + target_shape[part] + to * target_shape[part + 1]
                copy_token(source[a:], source_shape[part + 2], target[b:], head_size)
            read += source_shape[5]
            written += target_shape[5]


@kernel
def copy_token(source: Bits, stride: int, target: Bits, head_size: int) -> None:
    """One head's K or V; every dimension is `stride` elements behind the one before it."""
    if stride == 1:
        for d in range(head_size):
            target[d] = source[d]
    else:
        for d in range(head_size):
            target[d * stride] = source[d * stride]
