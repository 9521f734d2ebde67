"""Page tables at page size 1: the slot of every live token, in logical order, on the device.

A block table of page size S over [N, S] blocks and one of page size 1 over [N * S, 1] slots address
the same memory; only the second can skip holes. One page table covers the entire batch, so
attention stays one kernel call:

    dense row       page[i] = block_table[i // S] * S + i % S  (made on the device)
    row with holes  page[i] = slot of the i-th live token      (resident on the device, see below)

Rows with holes are in logical order, so attention reads the same values in the same order after any
relocation. Such a row stays on the device from step to step. The entire row is uploaded again when
one of its tokens died or moved; otherwise only new tokens are. The score probe also reads keys
through resident rows, of dense requests too.
Invariant: if a resident row has the version of its mirror, its first entries are the slots of the
mirror's live tokens, up to the number of tokens that were uploaded.
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.base.rows import Rows
from vtoken.core.protocol.mirror import Mirrors
from vtoken.core.protocol.step import NO_IDS
from vtoken.vllm.cuda.copies.transfer import upload

ROW_ALIGNMENT = 256  # tokens; a row's length is a multiple of it


class Uploads(Rows):
    """By row of the mirrors: what of it is on the device."""

    resident: Ints  # the row of the table; -1: none
    version: Ints  # of the mirror, at the last upload
    num_tokens: Ints  # of the mirror, at the last upload

    def __init__(self) -> None:
        names = ("resident", "version", "num_tokens")
        super().__init__(np.dtype([(name, np.int64) for name in names]), unused=-1)


class PageTables:
    """The resident rows of one worker, and the page table of a batch."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._table = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._uploads = Uploads()
        self._free: list[int] = []
        self._offsets = torch.arange(block_size, dtype=torch.int32, device=device)

    def release(self, mirrors: Mirrors) -> None:
        """Free the rows of requests that ended, or whose tokens died or moved since the upload."""
        known = self._extended(mirrors)
        num_rows = len(mirrors.columns.facts)
        changed = known.version[:num_rows] != mirrors.columns.version
        stale = np.flatnonzero((known.resident[:num_rows] >= 0) & changed)
        self._free += known.resident[stale].tolist()
        known.resident[stale] = -1

    def update(self, mirrors: Mirrors, rows: Ints) -> Ints:
        """Update the resident rows of the requests `rows` [n] of `mirrors`, without duplicates.

        Returns the resident rows [n]. Makes two uploads at most.
        """
        if len(rows) == 0:
            return NO_IDS
        known, columns = self._extended(mirrors), mirrors.columns
        new = rows[known.resident[rows] < 0]
        self._reserve(len(new), int(columns.num_live[rows].max()))
        if len(new):
            known.resident[new] = self._free[-len(new) :]
            del self._free[-len(new) :]
            known.version[new] = -1
        current = known.version[rows] == columns.version[rows]
        gained = columns.num_tokens[rows] - known.num_tokens[rows]
        self._upload_rows(mirrors, rows[~current])
        grown = np.flatnonzero(current & (gained > 0))
        self._upload_new_tokens(mirrors, rows[grown], gained[grown])
        known.version[rows] = columns.version[rows]
        known.num_tokens[rows] = columns.num_tokens[rows]
        return known.resident[rows]

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

        Batch row `rows[i]` is the resident row `resident[i]`; all other rows are dense. Entries
        beyond a row's length are arbitrary and not read.
        """
        blocks = -(-width // self._block_size)
        table = block_table[:, :blocks, None] * self._block_size + self._offsets
        pages = table.reshape(len(block_table), -1)
        if pages.shape[1] < width:  # physical lengths never exceed the block table's
            raise ValueError(f"{width} tokens do not fit {pages.shape[1]} slots of the block table")
        pages = pages[:, :width].contiguous()
        index = upload(np.stack([rows, resident]), self._device)
        copied = min(width, self._table.shape[1])
        rows_of_table = self._table.index_select(0, index[1])[:, :copied]
        pages[:, :copied].index_copy_(0, index[0], rows_of_table)
        return pages

    def _extended(self, mirrors: Mirrors) -> Uploads:
        """What is uploaded of every row of `mirrors`."""
        self._uploads.extend(len(mirrors.columns.facts))
        return self._uploads

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

    def _upload_rows(self, mirrors: Mirrors, rows: Ints) -> None:
        if len(rows) == 0:
            return
        _, slots = mirrors.live(rows)
        counts = slots.counts
        host = np.zeros((len(rows), int(counts.max()) + 1), dtype=np.int32)
        host[:, 0] = self._uploads.resident[rows]
        columns = 1 + np.arange(len(slots.values)) - np.repeat(slots.starts[:-1], counts)
        host[np.repeat(np.arange(len(rows)), counts), columns] = slots.values
        uploaded = upload(host, self._device)
        self._table[:, : host.shape[1] - 1].index_copy_(0, uploaded[:, 0].long(), uploaded[:, 1:])

    def _upload_new_tokens(self, mirrors: Mirrors, rows: Ints, gained: Ints) -> None:
        """Append the newest `gained` [n] tokens of `rows` [n], which have no other change."""
        if len(rows) == 0:
            return
        slots = mirrors.newest(rows, gained)
        first = mirrors.columns.num_live[rows] - gained
        columns = np.repeat(first - slots.starts[:-1], gained) + np.arange(len(slots.values))
        cells = np.stack([np.repeat(self._uploads.resident[rows], gained), columns, slots.values])
        uploaded = upload(cells, self._device)
        self._table.index_put_((uploaded[0], uploaded[1]), uploaded[2].int())
