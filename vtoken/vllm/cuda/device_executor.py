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
from vtoken.vllm.cuda.copies.host_copies import CUDAHostCopies
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.copies.streams import CUDAStreams, Streams
from vtoken.vllm.cuda.inputs import Positional, StepInputs
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.executor import Batch, StepExecutor
from vtoken.vllm.worker.ranks import Ranks


class DeviceExecutor:
    """One worker's device state.

    `caches`: one [N, H, S, C] a layer, in layout LBNHC, on the device of `tables`; `layers`: what
    signals need of the same. `ranks`: this worker's peers. `streams`: those of the device, by
    default.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        layers: Sequence[AttentionLayer],
        tables: PageTables,
        *,
        ranks: Ranks,
        copy_sync: bool = False,
        streams: Streams | None = None,
    ) -> None:
        block_size, device = caches[0].shape[2], tables.pages.device
        on_cuda = device.type == "cuda"
        if streams is None:
            streams = CUDAStreams(device) if on_cuda else Streams()
        self.copies = CUDACopyEngine(caches, streams, use_triton=on_cuda, sync=copy_sync)
        self.host_copies = CUDAHostCopies(caches, self.copies.stages, streams, use_triton=on_cuda)
        self.layers = layers
        self.staging = Staging(device)
        self.scores = DeviceScores(layers, tables, self.staging, streams)
        self.executor = StepExecutor(block_size, self.copies.contents, self.scores, ranks)
        self.inputs = StepInputs(tables, block_size, self.staging)

    def relocate(self, plan: StepPlan, zero: Callable[[], None] | None = None) -> None:
        """Launch the step's copies: park, relocate, restore.

        `zero` clears blocks that copies write, on their stream and before them, but after tokens
        are parked from there.
        """
        executor, host = self.executor, self.host_copies
        host.limit(plan.park_capacity)
        if len(plan.park_slots):
            with executor.parks():
                executor.note_park(host.park(plan.park_slots, plan.park_hosts))
        if zero is not None and (len(plan.source_slots) or len(plan.restore_slots)):
            self.copies.stages.launch(zero)
        if len(plan.source_slots):
            copy_us = self.copies.copy(plan.source_slots, plan.destination_slots)
            executor.note_copy(copy_us)
        if len(plan.restore_slots):
            executor.note_restore(host.restore(plan.restore_hosts, plan.restore_slots))

    @property
    def leaves_full_graphs(self) -> bool:
        """Whether a layer is probed whose queries full CUDA graphs do not save."""
        plan = self.executor.plan
        if plan is None or not plan.probed:
            return False
        kept = {plan.signals[name] for name in plan.probed if name in plan.signals}
        signals = {signal for of_request in kept for signal in of_request if not signal.of_keys}
        return any(not self.layers[n].in_graphs for signal in signals for n in signal.layers)

    def present(self, batch: Batch, given: Positional) -> None:
        """Make the inputs of the step's attention and set its context, until `clear`.

        `given` is the batch as vLLM prepared it; its slot mapping and `max_lens` are corrected.
        """
        executor, plan = self.executor, self.executor.plan
        step = executor.physical(batch)
        self.inputs.put(step, batch, given.max_lens)
        if step is not None and plan is not None and (step.probed or plan.want_scores):
            rows = dict(zip(batch.names, range(len(batch.names)), strict=True))
            self.scores.put(step.probed, plan, step.mirrors, rows, executor.ranks)
        self.staging.send()
        self.inputs.fill(given)
        steps.set_current(steps.CUDAStep(given.max_lens, self.scores.probe))

    def clear(self) -> None:
        """Forget the step's context: what runs now is no step, or has not been prepared."""
        steps.set_current(None)

    def forward_ended(self) -> None:
        """Call when the entire forward has been launched, and nothing after it.

        Key signals are read from the cache now, so the next relocations wait for that too.
        """
        self.executor.forward_ended()
        self.copies.stages.forward_ended()
