"""Page tables at page size 1: the slot of every live token, in logical order, on the device.

A block table of page size S over [N, S] blocks and one of page size 1 over [N * S, 1] slots address
the same memory; the second can leave holes out. It is made for the whole batch, so attention stays
one kernel call:

    dense row   page[i] = block_table[i // S] * S + i % S      (made on the device)
    holey row   page[i] = slot of the i-th live token          (resident on the device, see below)

Because rows of holey requests are in logical order, attention reads the same numbers in the same
order wherever relocation has put them. A holey request's row stays on the device from step to step:
it is sent as a whole when tokens of it died or moved, and grows by its new tokens otherwise. The
score probe reads the keys of its requests through resident rows too, dense or not.
Invariant: the first entries of a resident row whose version is its mirror's are the slots of the
mirror's live tokens up to the number of tokens that were sent.
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.arrays import Ints
from vtoken.protocol.mirror import LIVE, TOKENS, VERSION, Mirrors
from vtoken.protocol.step import NO_IDS
from vtoken.vllm.cuda.copies.transfer import upload

ROW_ALIGNMENT = 256  # tokens; a row grows by whole multiples of it


class PageTables:
    """The resident rows of holey requests of one worker, and the batch's table made with them.

    By row of the mirrors: `_resident`, the row of the table, -1 for none; `_version`, of the mirror
    when it was sent, and `_tokens`, how many it had then.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._table = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._resident = self._version = self._tokens = NO_IDS
        self._free: list[int] = []
        self._offsets = torch.arange(block_size, dtype=torch.int32, device=device)

    @property
    def num_resident(self) -> int:
        """Requests that have a row."""
        return int((self._resident >= 0).sum())

    def release(self, mirrors: Mirrors) -> None:
        """Give up the rows of requests that are gone, or whose tokens died or moved since."""
        self._reach(mirrors)
        stale = (self._resident >= 0) & (self._version != mirrors.facts[VERSION])
        self._free += self._resident[stale].tolist()
        self._resident[stale] = -1

    def update(self, mirrors: Mirrors, rows: Ints) -> Ints:
        """Bring the rows of the requests `rows` [n] of `mirrors` up to date, each of them once.

        Returns their resident rows [n]. Two uploads at most.
        """
        if len(rows) == 0:
            return NO_IDS
        self._reach(mirrors)
        facts = mirrors.facts
        new = rows[self._resident[rows] < 0]
        self._reserve(len(new), int(facts[LIVE, rows].max()))
        if len(new):
            self._resident[new] = self._free[-len(new) :]
            del self._free[-len(new) :]
            self._version[new] = -1
        current = self._version[rows] == facts[VERSION, rows]
        gained = facts[TOKENS, rows] - self._tokens[rows]
        self._send_whole(mirrors, rows[~current])
        grown = np.flatnonzero(current & (gained > 0))
        self._send_grown(mirrors, rows[grown], gained[grown])
        self._version[rows], self._tokens[rows] = facts[VERSION, rows], facts[TOKENS, rows]
        return self._resident[rows]

    def slots(self, row: int, num_live: int) -> torch.Tensor:
        """The first `num_live` slots of a resident row, int32, until the next `update`."""
        return self._table[row, :num_live]

    @property
    def table(self) -> torch.Tensor:
        """All resident rows [rows, width] int32, until the next `update`."""
        return self._table

    def batch(
        self, block_table: torch.Tensor, rows: Ints, resident: Ints, width: int
    ) -> torch.Tensor:
        """The page table [R, width] int32 of a batch with block table `block_table` [R, m].

        Batch row `rows[i]` is the resident row `resident[i]`; the others are dense. Entries behind
        a row's length are slots of whatever stands in the block table there, and are not read.
        """
        blocks = -(-width // self._block_size)
        table = block_table[:, :blocks, None] * self._block_size + self._offsets
        pages = table.reshape(len(block_table), -1)
        if pages.shape[1] < width:  # physical lengths never exceed the block table's
            raise ValueError(f"{width} tokens do not fit {pages.shape[1]} places")
        pages = pages[:, :width].contiguous()
        index = upload(np.stack([rows, resident]), self._device)
        have = min(width, self._table.shape[1])
        pages[:, :have].index_copy_(0, index[0], self._table.index_select(0, index[1])[:, :have])
        return pages

    def _reach(self, mirrors: Mirrors) -> None:
        """Know every row that `mirrors` has."""
        known, rows = len(self._resident), mirrors.facts.shape[1]
        if known < rows:
            more = np.full(rows - known, -1, dtype=np.int64)
            self._resident = np.concatenate([self._resident, more])
            self._version = np.concatenate([self._version, more])
            self._tokens = np.concatenate([self._tokens, more])

    def _reserve(self, num_new: int, longest: int) -> None:
        rows, width = self._table.shape
        needed = rows - len(self._free) + num_new
        new_rows = rows if needed <= rows else max(needed, 2 * rows)
        new_width = width if longest <= width else max(longest, 2 * width)
        if (new_rows, new_width) == (rows, width):
            return
        new_width = -(-new_width // ROW_ALIGNMENT) * ROW_ALIGNMENT
        grown = torch.zeros((new_rows, new_width), dtype=torch.int32, device=self._device)
        grown[:rows, :width] = self._table
        self._table = grown
        self._free.extend(range(rows, new_rows))

    def _send_whole(self, mirrors: Mirrors, rows: Ints) -> None:
        if len(rows) == 0:
            return
        _, slots = mirrors.live(rows)
        counts = slots.counts
        host = np.zeros((len(rows), int(counts.max()) + 1), dtype=np.int32)
        host[:, 0] = self._resident[rows]
        columns = 1 + np.arange(len(slots.values)) - np.repeat(slots.starts[:-1], counts)
        host[np.repeat(np.arange(len(rows)), counts), columns] = slots.values
        sent = upload(host, self._device)
        self._table[:, : host.shape[1] - 1].index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def _send_grown(self, mirrors: Mirrors, rows: Ints, gained: Ints) -> None:
        """The newest `gained` [n] tokens of `rows` [n]: nothing else has changed in them."""
        if len(rows) == 0:
            return
        slots = mirrors.newest(rows, gained)
        first = mirrors.facts[LIVE, rows] - gained
        columns = np.repeat(first - slots.starts[:-1], gained) + np.arange(len(slots.values))
        cells = np.stack([np.repeat(self._resident[rows], gained), columns, slots.values])
        sent = upload(cells, self._device)
        self._table.index_put_((sent[0], sent[1]), sent[2].int())
