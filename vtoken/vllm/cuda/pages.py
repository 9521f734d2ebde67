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
Invariant: a resident row's first `num_live` entries are `mirror.live()`'s slots.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.protocol.mirror import Mirror
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.worker.executor import HoleyRow

ROW_ALIGNMENT = 256  # tokens; a row grows by whole multiples of it


@dataclass(frozen=True, slots=True)
class LiveRow:
    """The live tokens of a request as `mirror` has them, `num_live` of them."""

    request_id: str
    mirror: Mirror
    num_live: int

    @classmethod
    def of(cls, holey: HoleyRow) -> LiveRow:
        return cls(holey.row.request_id, holey.mirror, holey.part.num_live)


@dataclass(slots=True)
class Resident:
    """A request's row of the resident table, and the tokens the request has had up to now."""

    row: int
    num_live: int
    num_tokens: int


class PageTables:
    """The resident rows of holey requests of one worker, and the batch's table made with them."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._table = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._resident: dict[str, Resident] = {}
        self._free: list[int] = []
        self._offsets = torch.arange(block_size, dtype=torch.int32, device=device)

    def forget(self, request_id: str) -> None:
        """Tokens of the request died or moved: its row is sent as a whole when it is needed."""
        have = self._resident.pop(request_id, None)
        if have is not None:
            self._free.append(have.row)

    def keep_only(self, request_ids: Container[str]) -> None:
        """Forget all other requests: they are finished, preempted or start anew."""
        for request_id in [known for known in self._resident if known not in request_ids]:
            self.forget(request_id)

    def update(self, requests: Sequence[LiveRow]) -> list[int]:
        """Bring the rows of this step's `requests` up to date; their rows, in order.

        `forget` has been called for all whose tokens died or moved. Two uploads at most.
        """
        if not requests:
            return []
        whole: list[tuple[int, np.ndarray]] = []
        grown: list[tuple[int, int, np.ndarray]] = []
        num_new = sum(request.request_id not in self._resident for request in requests)
        self._reserve(num_new, max(request.num_live for request in requests))
        for request in requests:
            mirror = request.mirror
            have = self._resident.get(request.request_id)
            new = 0 if have is None else mirror.num_tokens - have.num_tokens
            if have is not None and new >= 0 and have.num_live + new == request.num_live:
                if new:
                    grown.append((have.row, have.num_live, mirror.newest(new)))
            else:
                if have is None:
                    have = Resident(self._free.pop(), 0, 0)
                    self._resident[request.request_id] = have
                _, slots = mirror.live()
                whole.append((have.row, slots))
            have.num_live = request.num_live
            have.num_tokens = mirror.num_tokens
        self._send_whole(whole)
        self._send_grown(grown)
        return [self._resident[request.request_id].row for request in requests]

    def slots(self, row: int, num_live: int) -> torch.Tensor:
        """The first `num_live` slots of a resident row, int32, until the next `update`."""
        return self._table[row, :num_live]

    @property
    def table(self) -> torch.Tensor:
        """All resident rows [rows, width] int32, until the next `update`."""
        return self._table

    def batch(
        self, block_table: torch.Tensor, rows: Sequence[int], resident: Sequence[int], width: int
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
        index = upload(np.array([rows, resident], dtype=np.int64), self._device)
        have = min(width, self._table.shape[1])
        pages[:, :have].index_copy_(0, index[0], self._table.index_select(0, index[1])[:, :have])
        return pages

    def _reserve(self, num_new: int, longest: int) -> None:
        rows, width = self._table.shape
        needed = len(self._resident) + num_new
        new_rows = rows if needed <= rows else max(needed, 2 * rows)
        new_width = width if longest <= width else max(longest, 2 * width)
        if (new_rows, new_width) == (rows, width):
            return
        new_width = -(-new_width // ROW_ALIGNMENT) * ROW_ALIGNMENT
        grown = torch.zeros((new_rows, new_width), dtype=torch.int32, device=self._device)
        grown[:rows, :width] = self._table
        self._table = grown
        self._free.extend(range(rows, new_rows))

    def _send_whole(self, whole: list[tuple[int, np.ndarray]]) -> None:
        if not whole:
            return
        width = max(len(slots) for _, slots in whole)
        host = np.zeros((len(whole), width + 1), dtype=np.int32)
        for i, (row, slots) in enumerate(whole):
            host[i, 0] = row
            host[i, 1 : 1 + len(slots)] = slots
        sent = upload(host, self._device)
        self._table[:, :width].index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def _send_grown(self, grown: list[tuple[int, int, np.ndarray]]) -> None:
        cells: list[np.ndarray] = []
        for row, start, slots in grown:
            columns = np.arange(start, start + len(slots))
            cells.append(np.stack([np.full(len(slots), row), columns, slots]))
        if cells:
            sent = upload(np.concatenate(cells, axis=1).astype(np.int64), self._device)
            self._table.index_put_((sent[0], sent[1]), sent[2].int())
