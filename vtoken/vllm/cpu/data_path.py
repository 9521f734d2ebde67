"""The CPU's data path over a scratch cache, for the self-test: store, copies, packing, kernel."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.base.arrays import Ints
from vtoken.vllm.cpu.host_executor import HostExecutor, KVStore
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.worker.data_path import NUM_BLOCKS, DataPath
from vtoken.vllm.worker.executor import Batch
from vtoken.vllm.worker.ranks import Ranks


class CPUDataPath(DataPath):
    """`DataPath` on vLLM's CPU backend, with the learned layout.

    `cache` [N, H, S, 2D] only gives shape and type.
    """

    half: HostExecutor

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor, layout: KVLayout) -> None:
        scratch = torch.zeros((NUM_BLOCKS, *cache.shape[1:]), dtype=cache.dtype)
        impl = layer.impl
        half = HostExecutor(
            KVStore([scratch], layout),
            impl.num_heads,
            first_layer=impl.vtoken_layer,
            ranks=Ranks(),
        )
        super().__init__(layer, builder, scratch, half)

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        super().store(key, value, slots)
        self.half.packed.written(slots)

    def _present(self, batch: Batch, common: CommonAttentionMetadata) -> None:
        self.half.present(batch, common.slot_mapping)
