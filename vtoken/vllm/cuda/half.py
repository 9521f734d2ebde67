"""The device's half of a CUDA worker's step, the same for vLLM's model runners V1 and V2.

Composes the executor, the copy engine and the page tables; a runner only says where vLLM's own
steps are: its blocks are about to be written, its slot mapping exists, its forward was launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vtoken.errors import UnsupportedError
from vtoken.step import StepPlan
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.streams import CUDAStreams, HostStreams, Streams
from vtoken.vllm.cuda.support import NO_SIGNALS
from vtoken.vllm.cuda.upload import upload
from vtoken.vllm.executor import PhysicalStep, StepExecutor


class DeviceHalf:
    """`caches`: one [N, H, S, C] a layer, in layout LBNHC, on `device`."""

    def __init__(
        self, caches: Sequence[torch.Tensor], device: torch.device, *, copy_sync: bool = False
    ) -> None:
        block_size = caches[0].shape[2]
        on_cuda = device.type == "cuda"
        streams: Streams = CUDAStreams(device) if on_cuda else HostStreams()
        self.device = device
        self.copies = CUDACopyEngine(caches, streams, use_triton=on_cuda, sync=copy_sync)
        self._keys = [cache.transpose(1, 2)[..., : cache.shape[-1] // 2] for cache in caches]
        self.executor = StepExecutor(block_size, self.copies.contents, self.keys)
        self.pages = PageTables(block_size, device)

    def keys(self, layer: int) -> torch.Tensor:
        """The keys of `layer` as a view [N, S, Hkv, D]; raises UnsupportedError on CUDA."""
        if self.device.type == "cuda":
            raise UnsupportedError(NO_SIGNALS)
        return self._keys[layer]

    def relocate(self, plan: StepPlan) -> None:
        """Launch the step's copies, and give up page rows that are out of date, or nobody's."""
        self.pages.keep_only(self.executor.mirrors)
        for request_id, part in plan.requests.items():
            if len(part.evicted) or len(part.moved_ids):
                self.pages.forget(request_id)
        if len(plan.source_slots):
            copy_us = self.copies.copy(plan.source_slots, plan.destination_slots)
            self.executor.note_copy(copy_us)

    @property
    def leaves_full_graphs(self) -> bool:
        """Whether Python has to run inside attention in this step, which full graphs never do."""
        plan = self.executor.plan
        return plan is not None and (
            plan.probe_layers is not None
            or any(not part.dense and len(part.new_slots) for part in plan.requests.values())
        )

    def present(self, step: PhysicalStep | None, slot_mapping: torch.Tensor | None) -> None:
        """Correct `slot_mapping` [tokens] int64 and tell attention about the step; None: clear."""
        if step is None or slot_mapping is None or not (step.rows or step.probed):
            steps.set_current(None)
            return
        if step.rows:
            sent = upload(step.writes, self.device)
            slot_mapping.index_copy_(0, sent[0], sent[1])
        told = steps.CUDAStep(step, self.pages)
        told.holey_rows = [holey.row.index for holey in step.holey]
        told.resident = self.pages.update(step.holey)
        steps.set_current(told)
