"""The CUDA data path over a scratch cache, for the self-test: store, copies, pages, the kernel.

The layer, its implementation and its metadata builder are the engine's own. Only the cache is
replaced, in the same layout. The page table serves both ways of packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.arrays import Ints, Ragged
from vtoken.protocol.mirror import Mirrors
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.streams import CUDAStreams, HostStreams, Streams
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.layout import keys_of
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.executor import PhysicalStep, RowsWithHoles
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.selftest import NUM_BLOCKS, Read


class CUDADataPath:
    """`vtoken.vllm.worker.selftest.DataPath` on vLLM's CUDA backends.

    `cache` [N, H, S, 2D] only gives shape, type and device.
    """

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor) -> None:
        impl = layer.impl
        _, self.num_kv_heads, self.block_size, two_d = cache.shape
        self.head_size = two_d // 2
        self.num_heads = impl.num_heads
        self.scale = impl.scale
        self.soft_cap = float(impl.logits_soft_cap or 0.0)
        self.sinks = impl.sinks
        self.dtype, self.device = cache.dtype, cache.device
        self._layer, self._builder = layer, builder
        shape = (NUM_BLOCKS, self.block_size, self.num_kv_heads, two_d)
        memory = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        self._cache = memory.permute(0, 2, 1, 3)
        self._on_cuda = self.device.type == "cuda"
        streams: Streams = CUDAStreams(self.device) if self._on_cuda else HostStreams()
        self._copies = CUDACopyEngine([self._cache], streams, use_triton=self._on_cuda)
        self.layer_number = extract_layer_index(layer.layer_name)
        self.scores = DeviceScores(
            lambda _: keys_of(self._cache), self.num_heads, self.device, streams
        )

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        at = upload(slots, self.device)
        self._layer.impl.do_kv_cache_update(self._layer, key, value, self._cache, at)

    def relocate(self, source: Ints, destination: Ints) -> None:
        self._copies.stages.forward_ended()
        self._copies.copy(source, destination)
        self._copies.stages.guard()

    def attend(
        self,
        query: torch.Tensor,
        reads: list[Read],
        borrowed: list[int],  # noqa: ARG002
        probed: Sequence[ProbedRequest] = (),
    ) -> torch.Tensor:
        with_holes = [row for row, read in enumerate(reads) if read.how != "dense"]
        if probed:
            mirrors = probed[0].mirror.mirrors
        else:
            mirrors = Mirrors.of({str(row): reads[row].slots for row in with_holes})
        physical = PhysicalStep(
            mirrors,
            np.arange(len(reads)),
            np.array([len(read.slots) for read in reads]),
            with_holes=RowsWithHoles(
                np.array(with_holes, dtype=np.int64),
                mirrors.rows_of([str(row) for row in with_holes]),
                np.ones(len(with_holes), dtype=np.int64),
                Ragged.empty(len(with_holes)),
            ),
        )
        if probed:
            physical.probed = [*probed]
        pages = PageTables(self.block_size, self.device)
        steps.set_current(steps.make_step(physical, pages, use_triton=self._on_cuda))
        try:
            metadata = self._builder.build(0, self._common(reads))
        finally:
            steps.set_current(None)
        output = torch.empty_like(query)
        unused = query[:, : self.num_kv_heads]
        self._layer.impl.forward(self._layer, query, unused, unused, self._cache, metadata, output)
        return output

    def _common(self, reads: list[Read]) -> CommonAttentionMetadata:
        """One new token a request, and logical lengths longer than the physical ones."""
        width = max(len(read.blocks) for read in reads) + 1
        table = np.zeros((len(reads), width), dtype=np.int32)
        for row, read in enumerate(reads):
            table[row, : len(read.blocks)] = read.blocks
        starts = np.arange(len(reads) + 1, dtype=np.int32)
        logical = np.array([len(read.blocks) * self.block_size for read in reads], dtype=np.int32)
        last = np.array([int(read.slots[-1]) for read in reads], dtype=np.int64)
        return CommonAttentionMetadata(
            query_start_loc=upload(starts, self.device),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=upload(logical, self.device),
            seq_lens_cpu_upper_bound=torch.from_numpy(logical),
            num_reqs=len(reads),
            num_actual_tokens=len(reads),
            max_query_len=1,
            max_seq_len=int(logical.max()),
            block_table_tensor=upload(table, self.device),
            slot_mapping=upload(last, self.device),
        )
