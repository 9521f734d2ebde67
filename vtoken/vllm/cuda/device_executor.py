"""The device's half of a CUDA worker's step.

Composes the executor, the copy engine and the page tables. The runner calls it at three points of
vLLM's step: before blocks are written, when the slot mapping exists, and after the forward launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.streams import CUDAStreams, HostStreams, Streams
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.layout import keys_of
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.cuda.step import make_step
from vtoken.vllm.worker.executor import PhysicalStep, StepExecutor
from vtoken.vllm.worker.ranks import Ranks


class DeviceExecutor:
    """One worker's device state.

    `caches`: one [N, H, S, C] a layer, in layout LBNHC, on `device`, read by `num_heads` query
    heads of this rank. `ranks`: this worker's peers. `streams`: those of the device, by default.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        num_heads: int,
        device: torch.device,
        *,
        ranks: Ranks,
        copy_sync: bool = False,
        streams: Streams | None = None,
    ) -> None:
        block_size = caches[0].shape[2]
        on_cuda = device.type == "cuda"
        if streams is None:
            streams = CUDAStreams(device) if on_cuda else HostStreams()
        self.device = device
        self.copies = CUDACopyEngine(caches, streams, use_triton=on_cuda, sync=copy_sync)
        keys = [keys_of(cache) for cache in caches]
        scores = DeviceScores(keys.__getitem__, num_heads, device, streams)
        self.executor = StepExecutor(block_size, self.copies.contents, scores, ranks)
        self.pages = PageTables(block_size, device)
        self.triton_probe = on_cuda

    def relocate(self, plan: StepPlan, zero: Callable[[], None] | None = None) -> None:
        """Launch the step's copies, and free page rows that are stale or have no request.

        `zero` clears blocks that copies write, before them and on their stream.
        """
        self.pages.release(self.executor.mirrors)
        if len(plan.source_slots):
            copy_us = self.copies.copy(plan.source_slots, plan.destination_slots, zero)
            self.executor.note_copy(copy_us)

    @property
    def leaves_full_graphs(self) -> bool:
        """Whether this step runs Python code inside attention, which full CUDA graphs cannot."""
        plan = self.executor.plan
        if plan is None:
            return False
        requests = plan.requests
        with_holes = ~requests.dense & (requests.new_slots.counts > 0)
        return len(plan.probed) > 0 or bool(with_holes.any())

    def present(self, step: PhysicalStep | None, slot_mapping: torch.Tensor | None) -> None:
        """Correct `slot_mapping` [tokens] int64 and set the step's context; None clears it."""
        if step is None or slot_mapping is None or not (len(step.rows) or step.probed):
            steps.set_current(None)
            return
        if len(step.rows):
            sent = upload(step.writes, self.device)
            slot_mapping.index_copy_(0, sent[0], sent[1])
        steps.set_current(make_step(step, self.pages, use_triton=self.triton_probe))

    def forward_ended(self) -> None:
        """Call when the entire forward has been launched, and nothing after it.

        Key signals are read from the cache now, so the next relocations wait for that too.
        """
        self.executor.forward_ended()
        self.copies.stages.forward_ended()
