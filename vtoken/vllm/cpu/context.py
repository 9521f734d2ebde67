"""The current step's context: the runner sets it, the attention layers read it.

vLLM constructs the metadata builder and the attention layers and passes them no extra arguments, so
the context is a module global of the worker process. `current()` is None when vToken does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.core.protocol.step import NO_IDS
from vtoken.vllm.cpu.ahead_places import AheadPlaces
from vtoken.vllm.cpu.compiled_probe import StepProbe
from vtoken.vllm.cpu.holes import BorrowingRequests, BufferedRequests, PackedSlots, SideBufferPlan
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.worker.executor import PhysicalStep
from vtoken.vllm.worker.probe import ProbedRequest


class SideBuffer:
    """The side-buffer blocks of one model in one worker, grown on demand, shared by its layers.

    `layout`: of their caches.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._tensor: torch.Tensor | None = None

    def packed(self, plan: SideBufferPlan, cache: torch.Tensor) -> torch.Tensor:
        """At least `plan`'s blocks, into which its tokens are copied from a layer's `cache`."""
        buffer = self._blocks(plan.num_blocks, cache)
        plan.copies.copy(cache, buffer, self.layout)
        return buffer

    def _blocks(self, num_blocks: int, cache: torch.Tensor) -> torch.Tensor:
        """At least `num_blocks` blocks with the shape and type of `cache`'s, zeroed when new."""
        buffer = self._tensor
        shape = cache.shape[1:]
        if (
            buffer is None
            or len(buffer) < num_blocks
            or buffer.shape[1:] != shape
            or buffer.dtype != cache.dtype
        ):
            size = max(num_blocks, 2 * len(buffer) if buffer is not None else 0)
            self._tensor = buffer = torch.zeros((size, *shape), dtype=cache.dtype)
        return buffer


@dataclass(slots=True)
class StepContext:
    """One step's requests with holes, by the way attention reads them, and its probes.

    Row `rows[i]` of the batch reads `num_dead[i]` tokens fewer than vLLM counts.
    `packed` and `side_buffer` belong to the worker. `ahead`: where a drafter's layers compute, with
    `drafter_buffer` as their side buffer.
    `pack_ns`: time spent on packing in this step so far, over all layers.
    """

    layout: KVLayout
    packed: PackedSlots
    side_buffer: SideBuffer
    borrowing: BorrowingRequests | None = None
    buffered: BufferedRequests | None = None
    probe: StepProbe | None = None
    ahead: AheadPlaces | None = None
    drafter_buffer: SideBuffer | None = None
    pack_ns: int = 0
    rows: Ints = field(default_factory=lambda: NO_IDS)
    num_dead: Ints = field(default_factory=lambda: NO_IDS)

    def add(self, step: PhysicalStep) -> None:
        """Add `step`'s lengths, its requests with holes, by how they are read, and its probes."""
        self.rows, self.num_dead = step.rows, step.num_dead
        requests = step.with_holes
        borrows = requests.borrowed.counts > 0
        borrowing, buffered = np.flatnonzero(borrows), np.flatnonzero(~borrows)
        if len(borrowing):
            full, partial = step.mirrors.split(requests.rows[borrowing], self.packed.block_size)
            self.borrowing = BorrowingRequests(
                requests.index[borrowing], full, partial, requests.borrowed.take(borrowing)
            )
        if len(buffered):
            _, slots = step.mirrors.live(requests.rows[buffered])
            self.buffered = BufferedRequests(
                requests.index[buffered], slots, requests.num_new[buffered]
            )
        if step.probed:
            ProbedRequest.read(step.probed)
            self.probe = StepProbe(step.probed, self.packed.num_blocks, self.packed.block_size)

    @property
    def packed_tokens(self) -> int:
        """Tokens that attention reads from packed blocks, in each layer."""
        borrowed = 0 if self.borrowing is None else len(self.borrowing.partial_slots.values)
        return borrowed + (0 if self.buffered is None else len(self.buffered.slots.values))


_current: StepContext | None = None


def set_current(context: StepContext | None) -> None:
    global _current
    _current = context


def current() -> StepContext | None:
    return _current
