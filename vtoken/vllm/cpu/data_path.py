"""The CPU's data path over a scratch cache, for the self-test: store, copy engine, kernel, packing.

The layer, its implementation, its metadata builder and the learned layout are the engine's own.
Only the cache is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.arrays import Ints, Ragged
from vtoken.vllm.cpu import context
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu.holes import (
    BorrowingRequests,
    BufferedRequests,
    PackedSlots,
    split_partial,
)
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.cpu.probe import StepProbe
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.scores import HostScores
from vtoken.vllm.worker.selftest import NUM_BLOCKS, Read


class CPUDataPath:
    """`vtoken.vllm.worker.selftest.DataPath` on vLLM's CPU backend.

    `cache` [N, H, S, 2D] only gives shape and type.
    """

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor, layout: KVLayout) -> None:
        impl = layer.impl
        _, self.num_kv_heads, self.block_size, two_d = cache.shape
        self.head_size = two_d // 2
        self.num_heads = impl.num_heads
        self.scale = impl.scale
        self.soft_cap = float(impl.logits_soft_cap or 0.0)
        self.sinks = impl.sinks
        self.dtype, self.device = cache.dtype, cache.device
        self._layer, self._builder, self._layout = layer, builder, layout
        self._cache = torch.zeros((NUM_BLOCKS, *cache.shape[1:]), dtype=cache.dtype)
        self._copies = CPUCopyEngine([self._cache], layout)
        self._packed = PackedSlots(NUM_BLOCKS, self.block_size, num_layers=1)
        self.layer_number = extract_layer_index(layer.layer_name)
        self.scores = HostScores(lambda _: layout.views(self._cache)[0], self.num_heads)

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        self._layer.impl.do_kv_cache_update(
            self._layer, key, value, self._cache, torch.from_numpy(slots)
        )
        self._packed.written(slots)

    def relocate(self, source: Ints, destination: Ints) -> None:
        self._copies.copy(source, destination)
        self._packed.written(destination)

    def attend(
        self,
        query: torch.Tensor,
        reads: list[Read],
        borrowed: list[int],
        probed: Sequence[ProbedRequest] = (),
    ) -> torch.Tensor:
        step = context.StepContext(
            self._layout, self._packed, context.SideBuffer(), NUM_BLOCKS, self.block_size
        )
        step.borrowing, step.buffered = self._borrowing(reads, borrowed), self._buffered(reads)
        if probed:
            step.probe = StepProbe(probed, NUM_BLOCKS, self.block_size)
        context.set_current(step)
        try:
            metadata = self._builder.build(0, self._common(reads))
        finally:
            context.set_current(None)
        output = torch.empty_like(query)
        unused = query[:, : self.num_kv_heads]
        self._layer.impl.forward(self._layer, query, unused, unused, self._cache, metadata, output)
        return output

    def _borrowing(self, reads: list[Read], borrowed: list[int]) -> BorrowingRequests | None:
        rows = [row for row, read in enumerate(reads) if read.how == "borrowed"]
        if not rows:
            return None
        full, partial = zip(
            *(split_partial(reads[row].slots, self.block_size) for row in rows), strict=True
        )
        return BorrowingRequests(
            np.array(rows),
            Ragged.joined(full),
            Ragged.joined(partial),
            Ragged.joined([borrowed for _ in rows]),
        )

    def _buffered(self, reads: list[Read]) -> BufferedRequests | None:
        rows = [row for row, read in enumerate(reads) if read.how == "buffered"]
        if not rows:
            return None
        slots = Ragged.joined([reads[row].slots for row in rows])
        return BufferedRequests(np.array(rows), slots, np.ones(len(rows), dtype=np.int64))

    def _common(self, reads: list[Read]) -> CommonAttentionMetadata:
        """One new token a request, which attends to all of the request's live tokens."""
        width = max(len(read.blocks) for read in reads) + 1
        table = torch.zeros((len(reads), width), dtype=torch.int32)
        for row, read in enumerate(reads):
            table[row, : len(read.blocks)] = torch.tensor(read.blocks)
        starts = torch.arange(len(reads) + 1, dtype=torch.int32)
        lengths = torch.tensor([len(read.slots) for read in reads], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(reads),
            num_actual_tokens=len(reads),
            max_query_len=1,
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.tensor([int(read.slots[-1]) for read in reads]),
        )
