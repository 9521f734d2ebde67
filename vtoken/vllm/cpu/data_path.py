"""The CPU's data path over a scratch cache, for the self-test: store, copy engine, kernel, packing.

Everything is the engine's own: the layer, its implementation, its metadata builder, the layout that
was learned. Only the cache is another one.
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
    ApartRequests,
    LentRequests,
    PackedSlots,
    split_loose,
)
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.cpu.probe import StepProbe
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.scores import HostScores
from vtoken.vllm.worker.selftest import NUM_BLOCKS, Read


class CPUDataPath:
    """`vtoken.vllm.worker.selftest.DataPath` on vLLM's CPU backend; `cache` [N, H, S, 2D] is
    only looked at for its shape and type.
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
        lent: list[int],
        probed: Sequence[ProbedRequest] = (),
    ) -> torch.Tensor:
        step = context.StepContext(
            self._layout, self._packed, context.Scratch(), NUM_BLOCKS, self.block_size
        )
        step.lent, step.apart = self._lent(reads, lent), self._apart(reads)
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

    def _lent(self, reads: list[Read], lent: list[int]) -> LentRequests | None:
        rows = [row for row, read in enumerate(reads) if read.how == "lent"]
        if not rows:
            return None
        full, loose = zip(
            *(split_loose(reads[row].slots, self.block_size) for row in rows), strict=True
        )
        return LentRequests(
            np.array(rows),
            Ragged.joined(full),
            Ragged.joined(loose),
            Ragged.joined([lent for _ in rows]),
        )

    def _apart(self, reads: list[Read]) -> ApartRequests | None:
        rows = [row for row, read in enumerate(reads) if read.how == "apart"]
        if not rows:
            return None
        slots = Ragged.joined([reads[row].slots for row in rows])
        return ApartRequests(np.array(rows), slots, np.ones(len(rows), dtype=np.int64))

    def _common(self, reads: list[Read]) -> CommonAttentionMetadata:
        """One new token a request; every one attends to all that it can see."""
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
