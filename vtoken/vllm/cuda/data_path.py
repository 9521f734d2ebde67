"""The CUDA data path over a scratch cache, for the self-test: store, copies, pages, the kernel.

Its page tables are its own, filled as those that serve; both ways of packing are one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import BlockTables
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.copies.streams import CUDAStreams, HostStreams, Streams
from vtoken.vllm.cuda.inputs import Positional, StepInputs
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.data_path import NUM_BLOCKS, DataPath
from vtoken.vllm.worker.executor import Batch, PhysicalStep
from vtoken.vllm.worker.ranks import Ranks

MAX_READS = 8  # requests of a batch of the self-test


class CUDADataPath(DataPath):
    """`DataPath` on vLLM's CUDA backends.

    `cache` [N, H, S, 2D] only gives shape, type and device. The builder and the layer keep the
    tables and the queries of the self-test until the runner sets those that serve.
    """

    scores: DeviceScores

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor) -> None:
        _, heads, size, two_d = cache.shape
        shape = (NUM_BLOCKS, size, heads, two_d)
        scratch = torch.zeros(shape, dtype=cache.dtype, device=cache.device).permute(0, 2, 1, 3)
        super().__init__(layer, builder, scratch)
        on_cuda = self.device.type == "cuda"
        streams: Streams = CUDAStreams(self.device) if on_cuda else HostStreams()
        self._copies = CUDACopyEngine([scratch], streams, use_triton=on_cuda)
        self._tables = builder.vtoken_tables = PageTables(
            MAX_READS, NUM_BLOCKS * self.block_size, self.device
        )
        self._staging = Staging(self.device)
        signals = layer.impl.vtoken_signals = AttentionLayer.of(layer.impl, scratch)
        signals.hold(MAX_READS, self.dtype)
        of_layers = [signals] * (self.layer_number + 1)
        self.scores = DeviceScores(of_layers, self._tables, self._staging, streams)

    def relocate(self, source: Ints, destination: Ints) -> None:
        self._copies.stages.forward_ended()
        self._copies.copy(source, destination)
        self._copies.stages.guard()

    def _present(self, step: PhysicalStep, common: CommonAttentionMetadata, plan: StepPlan) -> None:
        """Present the step twice: rows are sent whole, and then kept on the device."""
        names, starts = [*map(str, range(common.num_reqs))], np.arange(common.num_reqs + 1)
        batch = Batch.of(names, starts, starts, lambda _: BlockTables.of([]))
        tables, staging = self._tables, self._staging
        inputs = StepInputs(tables, self.block_size, staging)
        lengths = common.seq_lens_cpu_upper_bound
        assert lengths is not None
        for again in (False, True):
            tables.pages.zero_()
            max_lens = lengths.numpy().copy()
            inputs.put(step, batch, max_lens)
            if again and step.probed:
                rows = {name: row for row, name in enumerate(names)}
                self.scores.put(step.probed, plan, step.mirrors, rows, Ranks())
            staging.send()
            inputs.fill(
                Positional(
                    common.block_table_tensor, common.seq_lens, common.slot_mapping, max_lens
                )
            )
        steps.set_current(steps.CUDAStep(max_lens, self.scores.probe))

    def _clear(self) -> None:
        steps.set_current(None)
