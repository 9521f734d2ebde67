"""Exact attention over requests with holes, with the stock kernel: live tokens are packed first.

A block is partial when some of its slots hold no live token. Attention is a sum over slots, and K
already contains the position, so slots may be read in any order. There are two ways to pack. Each
makes one packing call a layer for all its requests:

- *borrowed blocks*: tokens of partial blocks are packed into free blocks of the pool, borrowed for
  one step. Attention reads the full blocks in place and then the borrowed ones, in one call for the
  batch. A token that an earlier step packed into the same block is not copied again, see
  `PackedSlots`.
- *side buffer*: when too few blocks are free, full blocks are copied and tokens of partial blocks
  packed into blocks outside the pool, which attention reads in a second call. A chunk of several
  new tokens is read this way too, with the new tokens last and in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vtoken.base.arrays import Ints, Ragged
from vtoken.base.compiled import kernel
from vtoken.vllm.cpu.layout import Bits, KVLayout

Table = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int32]
NO_BLOCKS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class BorrowingRequests:
    """Requests packed into borrowed blocks; `rows` [r] of the batch.

    Per request: the full blocks, read in place; the slots of tokens in partial blocks; the
    `borrowed` blocks that those tokens are packed into.
    """

    rows: Ints
    full_blocks: Ragged
    partial_slots: Ragged
    borrowed: Ragged


@dataclass(frozen=True, slots=True)
class BufferedRequests:
    """Requests packed into the side buffer; `rows` [r] of the batch.

    Per request: the `slots` of its live tokens by id. The last `num_new` [r] are new.
    """

    rows: Ints
    slots: Ragged
    num_new: Ints


@dataclass(frozen=True, slots=True)
class PackCopies:
    """Entire blocks `full_from` [f] -> `full_to` [f], and tokens `source` [t] -> `target` [t]."""

    full_from: Ints
    full_to: Ints
    source: Ints
    target: Ints

    def copy(self, cache: torch.Tensor, packed: torch.Tensor, layout: KVLayout) -> None:
        """Copy K and V from `cache` to `packed`, both [N, H, S, 2D], possibly the same tensor."""
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
    """The packed copies that are still valid in borrowed blocks, slot by slot of the pool's cache.

    1. packed_at[s] = t if and only if source_of[t] = s; -1 where there is none
    2. then slots s and t hold the same K and V, in every layer
    3. `written(slots)` follows every write to the cache except the packing itself, and precedes the
       next `plan`; a step whose writes are unknown calls `invalidate`
    4. a plan that was not copied in all of `num_layers` layers is forgotten
    """

    def __init__(self, num_blocks: int, block_size: int, num_layers: int) -> None:
        self._num_layers = num_layers
        self.num_blocks, self.block_size = num_blocks, block_size
        self._num_copied = num_layers
        self.packed_at: Slots = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self.source_of: Slots = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self._index = np.full(num_blocks, -1, dtype=np.int64)
        self._any = False

    def invalidate(self) -> None:
        if self._any:
            self.packed_at.fill(-1)
            self.source_of.fill(-1)
            self._any = False

    def written(self, slots: Ints) -> None:
        """Invalidate copies from and in `slots` [k], which were written; skips negative slots."""
        if self._any:
            unlink(slots, self.packed_at, self.source_of)

    def plan(self, requests: BorrowingRequests, table: Table) -> PackCopies:
        """Plan the copies of each layer, and rewrite the block table rows in `table` [R, m].

        Raises ValueError when too few blocks are borrowed, IndexError for a block or slot outside
        the cache.
        """
        if self._num_copied != self._num_layers:
            self.invalidate()
        partial = requests.partial_slots
        source, target = np.empty_like(partial.values), np.empty_like(partial.values)
        num_copies = plan_borrowed(
            requests.rows,
            requests.full_blocks,
            partial,
            requests.borrowed,
            self.block_size,
            self._index,
            self.packed_at,
            self.source_of,
            table,
            source,
            target,
        )
        if num_copies < 0:
            self._index.fill(-1)
            self._any = True
            self.invalidate()
            raise _plan_error(requests, -1 - num_copies, len(self._index), self.block_size)
        self._any, self._num_copied = True, 0
        return PackCopies(NO_BLOCKS, NO_BLOCKS, source[:num_copies], target[:num_copies])

    def copied(self) -> None:
        """Note that one more layer has made the planned copies."""
        self._num_copied += 1


def _plan_error(requests: BorrowingRequests, r: int, num_blocks: int, block_size: int) -> Exception:
    num_borrowed = int(requests.borrowed.counts[r])
    num_tokens = int(requests.partial_slots.counts[r])
    if num_tokens > num_borrowed * block_size:
        return ValueError(
            f"{num_tokens} tokens of partial blocks do not fit {num_borrowed} borrowed blocks"
        )
    return IndexError(f"a packed request has a block outside the cache of {num_blocks} blocks")


@dataclass(frozen=True, slots=True)
class SideBufferPlan:
    """Packing into `num_blocks` side-buffer blocks, read through `block_table` [r, m] int32.

    `seq_lens` [r] int32.
    """

    copies: PackCopies
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_blocks: int


def plan_side_buffer(
    requests: BufferedRequests, num_blocks: int, block_size: int
) -> SideBufferPlan:
    """Plan the packing of `requests` from the pool of `num_blocks` blocks into the side buffer.

    Raises IndexError for a slot outside the pool.
    """
    slots, lengths = requests.slots, requests.slots.counts
    counts = -(-lengths // block_size)
    table: Table = np.zeros((len(lengths), int(counts.max())), dtype=np.int32)
    full_from, full_to = (np.empty(int(counts.sum()), dtype=np.int64) for _ in range(2))
    source, target = np.empty_like(slots.values), np.empty_like(slots.values)
    num_full, num_tokens = place_in_buffer(
        slots,
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
        raise IndexError(
            f"slot {slots.values[num_tokens]} is not in a cache of {num_blocks} blocks"
        )
    return SideBufferPlan(
        PackCopies(
            full_from[:num_full], full_to[:num_full], source[:num_tokens], target[:num_tokens]
        ),
        torch.from_numpy(table),
        torch.from_numpy(lengths.astype(np.int32)),
        int(counts.sum()),
    )


@kernel
def unlink(slots: Ints, packed_at: Slots, source_of: Slots) -> None:
    """Remove every link from or to a slot of `slots`; skips negative slots."""
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
def plan_borrowed(
    rows: Ints,
    full: Ragged,
    partial: Ragged,
    borrowed: Ragged,
    block_size: int,
    index: Ints,
    packed_at: Slots,
    source_of: Slots,
    table: Table,
    source: Ints,
    target: Ints,
) -> int:
    """Place the tokens of partial blocks; return the number of copies, or -1 - r if request r is
    invalid.

    The n tokens of a request fill the first n slots of its borrowed blocks, in any order. A token
    that is already there stays; the rest take the free slots in order. `index` [N] holds -1 before
    the call and, unless a request is invalid, after it.

        block table       A       B       C         D            S = 3; letters: live tokens
                      | a b c | d . . | . e f | g . . |          . dead or never written
        full                A                                    read in place
        partial                 d         e f     g              4 tokens, 2 borrowed blocks
        borrowed         X       Y
          before      | d . . | e . . |                          d and e were packed earlier
          after       | d f g | e . . |                          2 copies: f and g
        row of table    A  X  Y                                  attention reads the first 3 + 4
    """
    num_blocks, copies = len(index), 0
    taken = np.zeros(len(borrowed.values) * block_size, dtype=np.bool_)
    for r in range(len(rows)):
        own = borrowed.values[borrowed.starts[r] : borrowed.starts[r + 1]]
        slots = partial.values[partial.starts[r] : partial.starts[r + 1]]
        num_full, num_tokens = full.starts[r + 1] - full.starts[r], len(slots)
        num_borrowed = len(own)
        if num_tokens > num_borrowed * block_size or num_full + num_borrowed > table.shape[1]:
            return -1 - r
        for i in range(num_full):
            table[rows[r], i] = full.values[full.starts[r] + i]
        for i in range(num_borrowed):
            block = own[i]
            if block < 0 or block >= num_blocks:
                return -1 - r
            table[rows[r], num_full + i] = block
            index[block] = i
        taken[:num_tokens] = False
        start = copies
        for slot in slots:
            if slot < 0 or slot >= num_blocks * block_size:
                return -1 - r
            place, there = -1, packed_at[slot]
            if there >= 0 and index[there // block_size] >= 0:
                place = index[there // block_size] * block_size + there % block_size
            if 0 <= place < num_tokens:
                taken[place] = True
            else:
                source[copies] = slot
                copies += 1
        place = 0
        for i in range(start, copies):
            while taken[place]:
                place += 1
            slot, to = source[i], own[place // block_size] * block_size
            to += place % block_size
            place += 1
            unlink_one(slot, packed_at, source_of)
            unlink_one(to, packed_at, source_of)
            packed_at[slot], source_of[to] = to, slot
            target[i] = to
        for i in range(num_borrowed):
            index[own[i]] = -1
    return copies


@kernel
def place_in_buffer(
    slots: Ragged,
    num_new: Ints,
    block_size: int,
    counts: Ints,
    full_from: Ints,
    full_to: Ints,
    source: Ints,
    target: Ints,
    table: Table,
) -> tuple[int, int]:
    """Place each request in its own side-buffer blocks: full blocks first, then single tokens.

    Several new tokens are always copied one by one, last and in order. `counts` [N] holds 0.
    Returns the numbers of full blocks and of single tokens; or -1 and the position of a slot
    outside the N blocks.

        blocks of a request = ceil(its tokens / S), full ones at the front
    """
    num_full, num_tokens, next_block = 0, 0, 0
    for r in range(len(slots.starts) - 1):
        first, end = slots.starts[r], slots.starts[r + 1]
        old = end if num_new[r] == 1 else end - num_new[r]
        for j in range(first, end):
            if slots.values[j] < 0 or slots.values[j] >= len(counts) * block_size:
                return -1, j
        for j in range(first, old):
            counts[slots.values[j] // block_size] += 1
        begin = num_full
        for j in range(first, old):
            block = slots.values[j] // block_size
            if counts[block] == block_size:
                full_from[num_full] = block
                full_to[num_full] = next_block + num_full - begin
                num_full += 1
                counts[block] = -1  # copied as a block
        to = (next_block + num_full - begin) * block_size
        for j in range(first, end):
            if j >= old or counts[slots.values[j] // block_size] >= 0:
                source[num_tokens] = slots.values[j]
                target[num_tokens] = to
                num_tokens += 1
                to += 1
        for j in range(first, old):
            counts[slots.values[j] // block_size] = 0
        num_blocks = (end - first + block_size - 1) // block_size
        for i in range(num_blocks):
            table[r, i] = next_block + i
        next_block += num_blocks
    return num_full, num_tokens


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
    """Copy entire blocks, then tokens, from one cache to another or within one; see `Memory`."""
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
    """Copy one head's K or V; consecutive dimensions are `stride` elements apart."""
    if stride == 1:
        for d in range(head_size):
            target[d] = source[d]
    else:
        for d in range(head_size):
            target[d * stride] = source[d * stride]
