"""What the runner tells the attention layer about the current step, within one worker process.

vLLM's metadata builder and attention layers are made by vLLM and cannot be handed anything, so the
worker's one runner leaves it here. `current()` is None outside a step that concerns vToken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.vllm.cpu.holes import HoleyRequest, LentRequest, Scratch
from vtoken.vllm.cpu.layout import KVLayout
from vtoken.vllm.worker.probe import ProbedRequest


@dataclass(slots=True)
class StepContext:
    """One step's holey requests, by the way they are read, and its probes.

    `pack_ns`: what packing has taken in this step so far; every layer adds to it.
    """

    layout: KVLayout
    scratch: Scratch
    block_size: int
    lent: list[LentRequest] = field(default_factory=list)
    apart: list[HoleyRequest] = field(default_factory=list)
    probed: list[ProbedRequest] = field(default_factory=list)
    probe_layers: frozenset[int] = frozenset()
    pack_ns: int = 0

    @property
    def packed_tokens(self) -> int:
        """Tokens that each layer packs."""
        lent = sum(len(request.loose_slots) for request in self.lent)
        return lent + sum(len(request.slots) for request in self.apart)


_current: StepContext | None = None


def set_current(context: StepContext | None) -> None:
    global _current
    _current = context


def current() -> StepContext | None:
    return _current
