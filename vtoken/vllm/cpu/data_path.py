"""The CPU's data path over a scratch cache, for the self-test: store, copies, packing, kernel."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.base.arrays import Ints
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cpu import context
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu.holes import PackedSlots
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.worker.data_path import NUM_BLOCKS, DataPath
from vtoken.vllm.worker.executor import PhysicalStep
from vtoken.vllm.worker.scores import HostScores


class CPUDataPath(DataPath):
    """`DataPath` on vLLM's CPU backend, with the learned layout.

    `cache` [N, H, S, 2D] only gives shape and type.
    """

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor, layout: KVLayout) -> None:
        scratch = torch.zeros((NUM_BLOCKS, *cache.shape[1:]), dtype=cache.dtype)
        super().__init__(layer, builder, scratch)
        self._layout = layout
        self._copies = CPUCopyEngine([scratch], layout)
        self._packed = PackedSlots(NUM_BLOCKS, self.block_size, num_layers=1)
        self.scores = HostScores(lambda _: layout.views(scratch)[0], self.num_heads)

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        super().store(key, value, slots)
        self._packed.written(slots)

    def relocate(self, source: Ints, destination: Ints) -> None:
        self._copies.copy(source, destination)
        self._packed.written(destination)

    def _present(
        self,
        step: PhysicalStep,
        common: CommonAttentionMetadata,  # noqa: ARG002
        plan: StepPlan,  # noqa: ARG002
    ) -> None:
        current = context.StepContext(
            self._layout, self._packed, context.SideBuffer(), NUM_BLOCKS, self.block_size
        )
        current.add(step)
        context.set_current(current)

    def _clear(self) -> None:
        context.set_current(None)
