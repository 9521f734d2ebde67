"""The device's half of a CUDA worker's step.

Composes the executor, the copy engine and the inputs of attention. The runner calls it at three
points of vLLM's step: before blocks are written, when vLLM's own inputs exist, and after the
forward launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cuda import step as steps
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.copies.streams import CUDAStreams, HostStreams, Streams
from vtoken.vllm.cuda.inputs import Positional, StepInputs
from vtoken.vllm.cuda.layout import keys_of
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.executor import Batch, StepExecutor
from vtoken.vllm.worker.ranks import Ranks


class DeviceExecutor:
    """One worker's device state.

    `caches`: one [N, H, S, C] a layer, in layout LBNHC, on the device of `tables`, read by
    `num_heads` query heads of this rank. `ranks`: this worker's peers. `streams`: those of the
    device, by default.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        num_heads: int,
        tables: PageTables,
        *,
        ranks: Ranks,
        copy_sync: bool = False,
        streams: Streams | None = None,
    ) -> None:
        block_size, device = caches[0].shape[2], tables.pages.device
        on_cuda = device.type == "cuda"
        if streams is None:
            streams = CUDAStreams(device) if on_cuda else HostStreams()
        self.copies = CUDACopyEngine(caches, streams, use_triton=on_cuda, sync=copy_sync)
        keys = [keys_of(cache) for cache in caches]
        scores = DeviceScores(keys.__getitem__, num_heads, device, streams)
        self.executor = StepExecutor(block_size, self.copies.contents, scores, ranks)
        self.tables = tables
        self.staging = Staging(device)
        self.inputs = StepInputs(tables, block_size, self.staging)
        self.triton_probe = on_cuda

    def relocate(self, plan: StepPlan, zero: Callable[[], None] | None = None) -> None:
        """Launch the step's copies.

        `zero` clears blocks that copies write, before them and on their stream.
        """
        if len(plan.source_slots):
            copy_us = self.copies.copy(plan.source_slots, plan.destination_slots, zero)
            self.executor.note_copy(copy_us)

    @property
    def leaves_full_graphs(self) -> bool:
        """Whether this step runs Python code inside attention, which full CUDA graphs cannot."""
        plan = self.executor.plan
        return plan is not None and len(plan.probed) > 0

    def present(self, batch: Batch, given: Positional) -> None:
        """Make the inputs of the step's attention and set its context, until `clear`.

        `given` is the batch as vLLM prepared it; its slot mapping and `max_lens` are corrected.
        """
        step = self.executor.physical(batch)
        self.inputs.put(step, batch, given.max_lens)
        self.staging.send()
        self.inputs.fill(given)
        current = steps.CUDAStep(given.max_lens)
        if step is not None:
            current.probe = steps.probe_of(step, batch, self.tables, use_triton=self.triton_probe)
        steps.set_current(current)

    def clear(self) -> None:
        """Forget the step's context: what runs now is no step, or has not been prepared."""
        steps.set_current(None)

    def forward_ended(self) -> None:
        """Call when the entire forward has been launched, and nothing after it.

        Key signals are read from the cache now, so the next relocations wait for that too.
        """
        self.executor.forward_ended()
        self.copies.stages.forward_ended()
