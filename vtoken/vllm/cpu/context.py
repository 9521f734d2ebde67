"""What the runner tells the attention layer about the current step, within one worker process.

vLLM's metadata builder and attention layers are made by vLLM and cannot be handed anything, so the
worker's one runner leaves it here. `current()` is None outside a step that concerns vToken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken.vllm.cpu.holes import ApartRequests, LentRequests, PackedSlots
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.cpu.probe import StepProbe


class Scratch:
    """The scratch blocks of one worker, grown on demand, shared by all layers of one shape."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def blocks(self, num_blocks: int, cache: torch.Tensor) -> torch.Tensor:
        """At least `num_blocks` blocks shaped and typed like those of `cache`, zeroed when new."""
        have = self._tensor
        shape = cache.shape[1:]
        if (
            have is None
            or len(have) < num_blocks
            or have.shape[1:] != shape
            or have.dtype != cache.dtype
        ):
            size = max(num_blocks, 2 * len(have) if have is not None else 0)
            self._tensor = have = torch.zeros((size, *shape), dtype=cache.dtype)
        return have


@dataclass(slots=True)
class StepContext:
    """One step's holey requests, by the way they are read, and its probes.

    `packed` and `scratch` are the worker's; `num_blocks`, `block_size`: of its cache.
    `pack_ns`: what packing has taken in this step so far; every layer adds to it.
    """

    layout: KVLayout
    packed: PackedSlots
    scratch: Scratch
    num_blocks: int
    block_size: int
    lent: LentRequests | None = None
    apart: ApartRequests | None = None
    probe: StepProbe | None = None
    pack_ns: int = 0

    @property
    def packed_tokens(self) -> int:
        """Tokens in partial blocks that attention reads out of packed ones, in each layer."""
        lent = 0 if self.lent is None else len(self.lent.loose_slots.values)
        return lent + (0 if self.apart is None else len(self.apart.slots.values))


_current: StepContext | None = None
_packed: PackedSlots | None = None  # of the worker's cache


def set_current(context: StepContext | None) -> None:
    global _current
    _current = context


def current() -> StepContext | None:
    return _current


def set_packed(packed: PackedSlots) -> None:
    global _packed
    _packed = packed


def forget_packed() -> None:
    """The cache is written where nobody says what."""
    if _packed is not None:
        _packed.forget()
