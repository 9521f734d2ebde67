"""The inputs of a step's attention, made on the device by one launch from one upload.

Attention reads every batch at page size 1, with one row of `pages` a request:

    positional row  page[i] = block_table[i // S] * S + i % S, for as many tokens as vLLM counts
    planned row     page[i] = slot of the i-th live token, in logical order

A planned row is that of a request that has evicted something. Logical order gives attention the
same values in the same order wherever a token lies. vLLM sorts the batch in every step, so `pages`
is written anew each time. Planned rows stay on the device by request (`resident`), and only their
new slots are sent, unless one of their tokens died, moved, came back or was taken back.

1. pages[b, : seq_lens[b]] are the slots of the live tokens of the request in row b of the batch
2. if `_version[r]` is the version of row r of the mirrors, resident[r] are the slots of its live
   tokens among the first `_num_tokens[r]`
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vtoken.vllm.cuda.copies.staging import Section, Staging
from vtoken.vllm.cuda.pages import HEADER, PageTables
from vtoken.vllm.worker.executor import Batch, PhysicalStep


class Positional(NamedTuple):
    """The inputs of a batch of R rows as vLLM made them, padding included.

    `block_table` [R, m] and `seq_lens` [R] int32; `slot_mapping` [T] int64, which planned rows
    correct; `max_lens` [R]: upper bounds of `seq_lens`, on the host.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    max_lens: npt.NDArray[np.int32]


class StepInputs:
    """Fills `tables` in every step: `put`, then `staging.send`, then `fill`."""

    def __init__(self, tables: PageTables, block_size: int, staging: Staging) -> None:
        rows = len(tables.pages)
        self._tables = tables
        self._block_size = block_size
        self._staging = staging
        self._version = np.full(rows, -1, dtype=np.int64)  # of the mirror, at the last upload
        self._num_tokens = np.zeros(rows, dtype=np.int64)  # of the mirror, at the last upload
        self._zeros = torch.zeros_like(tables.seq_lens).repeat(len(HEADER))
        self._header: Section | None = None
        self._sent: Section | None = None

    def put(self, step: PhysicalStep | None, batch: Batch, max_lens: npt.NDArray[np.int32]) -> None:
        """Stage what the planned rows of `step` need; corrects their `max_lens` [R]."""
        self._header = self._sent = None
        if step is None or not len(step.rows):
            return
        rows, of_mirrors, columns = step.rows, step.mirror_rows, step.mirrors.columns
        max_lens[rows] = step.seq_lens
        num_new, (_, slots) = batch.num_new[rows], step.writes
        num_tokens, version = columns.num_tokens[of_mirrors], columns.version[of_mirrors]
        stays = self._version[of_mirrors] == version
        stays &= self._num_tokens[of_mirrors] >= num_tokens - num_new
        self._version[of_mirrors], self._num_tokens[of_mirrors] = version, num_tokens
        old = step.seq_lens - num_new
        kept, source = old, np.cumsum(num_new) - num_new - old
        if not stays.all():
            _, live = step.mirrors.live(of_mirrors[~stays])
            kept = np.where(stays, old, 0)
            source[~stays] = len(slots) + live.starts[:-1]
            slots = np.concatenate([slots, live.values])
        header = np.zeros((len(HEADER), len(max_lens)), dtype=np.int32)
        header[:, rows] = step.seq_lens, old, kept, source, batch.first[rows] - old, of_mirrors
        self._header, self._sent = self._staging.put(header), self._staging.put(slots)

    def fill(self, given: Positional) -> None:
        """Write the tables, and the planned rows' part of `given.slot_mapping`, in one launch."""
        from vtoken.vllm.cuda.kernels import fill_tables

        header = self._zeros if self._header is None else self._header.on_device
        sent = self._zeros if self._sent is None else self._sent.on_device
        fill_tables(
            header,
            sent,
            given.block_table,
            given.seq_lens,
            self._tables,
            given.slot_mapping,
            block_size=self._block_size,
            width=int(given.max_lens.max()),
        )
