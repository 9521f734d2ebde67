"""The host's half of a CPU worker's step, where everything runs in one thread, in program order.

Composes the executor, the copy engine and the packing of holes, as
`vtoken.vllm.cuda.device_executor` does on a device. The runner calls it; the self-test drives one
over a scratch cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.core.protocol.integrity import LayerBytes
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cpu import context
from vtoken.vllm.cpu.ahead_places import AheadPlaces
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu.holes import PackedSlots
from vtoken.vllm.cpu.host_copies import CPUHostCopies
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.worker.executor import Batch, StepExecutor
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import HostScores
from vtoken.vllm.worker.stages import ONE_STAGE, Stages


class KVStore:
    """The `caches` [N, H, S, 2D] of one model's layers: copies of tokens within them, and to host
    memory.
    """

    def __init__(self, caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self.caches, self.layout = caches, layout
        self.copies = CPUCopyEngine(caches, layout)
        self.host_copies = CPUHostCopies(self.copies.layers)
        self.side_buffer = context.SideBuffer(layout)


class HostExecutor:
    """One worker's state on the host.

    `model`: its first cache is of layer `first_layer`, read by `num_heads` query heads. `zero`
    clears blocks; None: no other group of layers writes blocks of the pool. `drafter`: None without
    one that has layers; it computes up to `lookahead` tokens behind those of a step.
    """

    def __init__(
        self,
        model: KVStore,
        num_heads: int,
        *,
        first_layer: int = 0,
        ranks: Ranks,
        stages: Stages = ONE_STAGE,
        zero: Callable[[Iterable[int]], None] | None = None,
        drafter: KVStore | None = None,
        lookahead: int = 0,
    ) -> None:
        num_blocks, _, self._block_size, _ = model.caches[0].shape
        self.model, self.drafter, self._lookahead = model, drafter, lookahead
        self.packed = PackedSlots(num_blocks, self._block_size, len(model.caches))
        self.scores = HostScores(self._keys, num_heads)
        self.executor = StepExecutor(self._block_size, self._contents, self.scores, ranks, stages)
        self._first_layer = first_layer
        self._zero = zero

    @property
    def _stores(self) -> list[KVStore]:
        """Of both models."""
        return [self.model] if self.drafter is None else [self.model, self.drafter]

    def _keys(self, layer: int) -> torch.Tensor:
        """The keys of the model's layer of full attention `layer`, which this stage holds."""
        keys, _ = self.model.layout.views(self.model.caches[layer - self._first_layer])
        return keys

    def _contents(self, slots: Ints) -> Iterator[LayerBytes]:
        """The bytes of the tokens in `slots` [n], layer by layer, of both models."""
        for store in self._stores:
            yield from store.copies.contents(slots)

    def relocate(self, plan: StepPlan) -> None:
        """Make the step's copies: park, relocate, restore."""
        copies = [store.copies for store in self._stores]
        host_copies = [store.host_copies for store in self._stores]
        for host in host_copies:
            host.limit(plan.park_capacity)
        if len(plan.park_slots):
            with self.executor.parks():
                parked = [host.park(plan.park_slots, plan.park_hosts) for host in host_copies]
                self.executor.note_park(sum(parked))
        if len(plan.source_slots):
            moved = [own.copy(plan.source_slots, plan.destination_slots) for own in copies]
            self.packed.written(plan.destination_slots)
            self.executor.note_copy(sum(moved))
        if len(plan.restore_slots):
            restored = [
                host.restore(plan.restore_hosts, plan.restore_slots) for host in host_copies
            ]
            self.packed.written(plan.restore_slots)
            self.executor.note_restore(sum(restored))

    def present(self, batch: Batch, slot_mapping: torch.Tensor) -> None:
        """Set the context of the step's attention, until `clear`; corrects `slot_mapping` [T]."""
        step = self.executor.physical(batch)
        if step is None:
            self.packed.invalidate()  # vLLM alone knows what this step writes
            return
        if len(step.rows):
            tokens, slots = torch.from_numpy(step.writes)
            slot_mapping[tokens] = slots
        borrowed = step.with_holes.borrowed.values
        if self._zero is not None and len(borrowed):  # another group may have written them
            self._zero(borrowed.tolist())
            first = borrowed[:, None] * self._block_size
            self.packed.written((first + np.arange(self._block_size)).ravel())
        current = context.StepContext(self.model.layout, self.packed, self.model.side_buffer)
        current.add(step)
        if self.drafter is not None and len(step.rows):
            current.drafter_buffer = self.drafter.side_buffer
            current.ahead = AheadPlaces.of(step, batch, self._block_size, self._lookahead)
        context.set_current(current)

    def clear(self) -> None:
        """End the step whose context is set, if there is one, and report its times."""
        done = context.current()
        context.set_current(None)
        if done is not None:
            self.executor.note_packing(done.pack_ns // 1000, done.packed_tokens)
            if done.probe is not None:
                self.executor.note_probe(done.probe.single_ns // 1000, done.probe.num_single)
