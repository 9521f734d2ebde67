"""Where a drafter with layers reads and writes in a step, of the requests that have evicted.

A drafter keeps K and V of a token in the token's slot, in layers of its own. Its passes follow the
model's forward in the same step. The first one computes the step's tokens again, and in some
methods the token sampled behind them; each further pass computes one draft more.

1. a token behind the step's tokens is `num_closed` places before its position: an engine with such
   a drafter recycles no hole (`TokenAppender.choose_places`), so the places are consecutive
2. a pass reads the first n of the request's live tokens and the places behind them, where n is
   vLLM's length less the dead tokens, as in the model's forward
3. what a pass writes behind the step's tokens is written again before a later step reads it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vtoken.base.arrays import Ints, Ragged, spans
from vtoken.core.protocol.mirror import BlockTables
from vtoken.vllm.cpu.holes import BufferedRequests
from vtoken.vllm.worker.executor import Batch, PhysicalStep


@dataclass(frozen=True, slots=True)
class AheadPlaces:
    """The places of one step's requests that have evicted, beyond those of the step's tokens.

    `rows` [r] of the batch; `num_closed` [r]; `tables`: their r block tables. `holes` [h]: which of
    the r have holes, `readable`: of each of these the slots of its live tokens by id, then those of
    the places behind them.
    """

    rows: Ints
    num_closed: Ints
    tables: BlockTables
    holes: Ints
    readable: Ragged
    block_size: int

    @classmethod
    def of(cls, step: PhysicalStep, batch: Batch, block_size: int, lookahead: int) -> AheadPlaces:
        """The places of `step`'s requests in `batch`, `lookahead` of them behind its tokens."""
        rows, num_closed, tables = step.rows, step.num_dead.copy(), batch.tables(step.rows)
        holes = np.searchsorted(rows, step.with_holes.index)
        places = cls(rows, num_closed, tables, holes, Ragged.empty(), block_size)
        if not len(holes):
            return places
        _, live = step.mirrors.live(step.with_holes.rows)
        num_tokens = (batch.num_computed + batch.num_new)[rows[holes]]
        newest = live.values[live.starts[1:] - 1]
        for i, slot, count in zip(
            holes.tolist(), newest.tolist(), num_tokens.tolist(), strict=True
        ):
            num_closed[i] = count - 1 - places._place_of(i, slot)
        ahead = spans(num_tokens, np.full_like(holes, lookahead))
        slots = places.slots(np.repeat(holes, lookahead), ahead.values)
        behind = (slots[ahead.starts[i] : ahead.starts[i + 1]] for i in range(len(holes)))
        parts = zip((live.of(i) for i in range(len(holes))), behind, strict=True)
        readable = Ragged.joined(np.concatenate(part) for part in parts)
        return cls(rows, num_closed, tables, holes, readable, block_size)

    def _place_of(self, i: int, slot: int) -> int:
        """The place of `slot` in request i's block table."""
        base, count = self.tables.bases[i], self.tables.counts[i]
        block, offset = divmod(slot, self.block_size)
        (index,) = np.flatnonzero(self.tables.blocks[base : base + count] == block)
        return int(index) * self.block_size + offset

    def slots(self, which: Ints, positions: Ints) -> Ints:
        """The slots of the tokens at `positions` [n], from the step's first on, of requests `which`
        [n] of the r; -1 for one that has no block, which is not written.
        """
        blocks, offsets = np.divmod(positions - self.num_closed[which], self.block_size)
        known = blocks < self.tables.counts[which]
        at = self.tables.bases[which] + np.where(known, blocks, 0)
        slots = self.tables.blocks[at].astype(np.int64) * self.block_size + offsets
        return np.where(known, slots, -1)

    def correct(
        self, slot_mapping: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Replace the slots in `slot_mapping` [T] of these requests' tokens at `positions` [T], but
        those that vLLM does not write; `starts` [R + 1]: the first token of each row of the batch.
        """
        first = starts.numpy().astype(np.int64)
        tokens = spans(first[self.rows], first[self.rows + 1] - first[self.rows])
        which = np.repeat(np.arange(len(self.rows)), tokens.counts)
        mapping, index = slot_mapping.numpy(), tokens.values
        slots = self.slots(which, positions.numpy()[index].astype(np.int64))
        mapping[index] = np.where(mapping[index] < 0, mapping[index], slots)

    def buffered(self, starts: torch.Tensor, seq_lens: torch.Tensor) -> BufferedRequests | None:
        """The requests with holes in a pass, all read from the side buffer; None if there are none.

        Rows of the pass begin at tokens `starts` [R + 1] and read `seq_lens` [R] tokens.
        """
        rows = self.rows[self.holes]
        if not len(rows):
            return None
        first, lengths = starts.numpy().astype(np.int64), seq_lens.numpy()[rows].astype(np.int64)
        read = spans(self.readable.starts[:-1], lengths)
        slots = Ragged(self.readable.values[read.values], read.starts)
        return BufferedRequests(rows, slots, first[rows + 1] - first[rows])
