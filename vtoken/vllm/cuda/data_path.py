"""The CUDA data path over a scratch cache, for the self-test: store, copies, pages, the kernel.

The page table serves both ways of packing.
"""

from __future__ import annotations

from typing import Any

import torch

from vtoken.base.arrays import Ints
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.streams import CUDAStreams, HostStreams, Streams
from vtoken.vllm.cuda.layout import keys_of
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.data_path import NUM_BLOCKS, DataPath
from vtoken.vllm.worker.executor import PhysicalStep


class CUDADataPath(DataPath):
    """`DataPath` on vLLM's CUDA backends.

    `cache` [N, H, S, 2D] only gives shape, type and device.
    """

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor) -> None:
        _, heads, size, two_d = cache.shape
        shape = (NUM_BLOCKS, size, heads, two_d)
        scratch = torch.zeros(shape, dtype=cache.dtype, device=cache.device).permute(0, 2, 1, 3)
        super().__init__(layer, builder, scratch)
        self._on_cuda = self.device.type == "cuda"
        streams: Streams = CUDAStreams(self.device) if self._on_cuda else HostStreams()
        self._copies = CUDACopyEngine([scratch], streams, use_triton=self._on_cuda)
        self.scores = DeviceScores(lambda _: keys_of(scratch), self.num_heads, self.device, streams)

    def relocate(self, source: Ints, destination: Ints) -> None:
        self._copies.stages.forward_ended()
        self._copies.copy(source, destination)
        self._copies.stages.guard()

    def _present(self, step: PhysicalStep | None) -> None:
        current = None
        if step is not None:
            pages = PageTables(self.block_size, self.device)
            current = steps.make_step(step, pages, use_triton=self._on_cuda)
        steps.set_current(current)
