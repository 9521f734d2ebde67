"""The CUDA data path over a scratch cache, for the self-test: store, copies, pages, the kernel.

Its page tables are its own, filled as those that serve; both ways of packing are one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cuda.device_executor import DeviceExecutor
from vtoken.vllm.cuda.inputs import Positional
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.worker.data_path import NUM_BLOCKS, DataPath
from vtoken.vllm.worker.executor import Batch
from vtoken.vllm.worker.ranks import Ranks

MAX_READS = 8  # requests of a batch of the self-test


class CUDADataPath(DataPath):
    """`DataPath` on vLLM's CUDA backends.

    `cache` [N, H, S, 2D] only gives shape, type and device. The builder and the layer keep the
    tables and the queries of the self-test until the runner sets those that serve.
    """

    half: DeviceExecutor

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor) -> None:
        _, heads, size, two_d = cache.shape
        shape = (NUM_BLOCKS, size, heads, two_d)
        scratch = torch.zeros(shape, dtype=cache.dtype, device=cache.device).permute(0, 2, 1, 3)
        self._tables = builder.vtoken_tables = PageTables(
            MAX_READS, NUM_BLOCKS * size, cache.device
        )
        signals = layer.impl.vtoken_signals = AttentionLayer.of(layer.impl, scratch)
        signals.hold(MAX_READS, cache.dtype)
        of_layers = [signals] * (layer.impl.vtoken_layer + 1)
        half = DeviceExecutor([scratch], of_layers, self._tables, ranks=Ranks())
        super().__init__(layer, builder, scratch, half)

    def copy(self, plan: StepPlan) -> str | None:
        self.half.forward_ended()
        fault = super().copy(plan)
        self.half.copies.stages.guard()
        return fault

    def _present(self, batch: Batch, common: CommonAttentionMetadata) -> None:
        lengths = common.seq_lens_cpu_upper_bound
        assert lengths is not None
        self._tables.pages.zero_()
        self.half.present(
            batch,
            Positional(
                common.block_table_tensor,
                common.seq_lens,
                common.slot_mapping,
                lengths.numpy().copy(),
            ),
        )
