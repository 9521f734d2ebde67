"""Relocation of tokens inside the KV cache: one gather, then one scatter, over all layers.

Knows slots and tensors, not requests. Because all sources of a step are read before any
destination is written, the order of moves does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from vtoken.pool import Slots
from vtoken.vllm.layout import KVLayout

View = tuple[torch.Tensor, torch.Tensor]


class CPUCopyEngine:
    """Copies K and V of token slots on the host, before the step's forward."""

    def __init__(self, caches: Sequence[torch.Tensor], layout: KVLayout, block_size: int) -> None:
        self._views: list[View] = [layout.views(cache) for cache in caches]
        self._block_size = block_size

    def copy(self, source: Slots, destination: Slots, *, verify: bool) -> tuple[int, str | None]:
        """Move `source` [k] to `destination` [k] in every layer.

        Returns the time in µs, and what is wrong when `verify` finds a relocated K or V that
        differs from what its source held.
        """
        started = time.perf_counter_ns()
        sb, so = self._split(source)
        db, do = self._split(destination)
        wrong = None
        for number, (key, value) in enumerate(self._views):
            k, v = key[sb, so], value[sb, so]
            key[db, do] = k
            value[db, do] = v
            if verify and not (torch.equal(key[db, do], k) and torch.equal(value[db, do], v)):
                wrong = f"K/V of a relocated token changed in layer {number}"
        return (time.perf_counter_ns() - started) // 1000, wrong

    def _split(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(slots)
        return index // self._block_size, index % self._block_size
