"""Relocation of tokens inside the KV cache: one gather, then one scatter, over all layers.

Knows slots and tensors, not requests. Because all sources of a step are read before any
destination is written, the order of moves does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vtoken.arrays import Ints
from vtoken.protocol.integrity import LayerBytes
from vtoken.vllm.cpu.layout import KVLayout

View = tuple[torch.Tensor, torch.Tensor]


class CPUCopyEngine:
    """Copies K and V of token slots on the host, before the step's forward."""

    def __init__(self, caches: Sequence[torch.Tensor], layout: KVLayout, block_size: int) -> None:
        self._views: list[View] = [layout.views(cache) for cache in caches]
        self._block_size = block_size

    def copy(self, source: Ints, destination: Ints) -> int:
        """Move `source` [k] to `destination` [k] in every layer; the time that took, in µs."""
        started = time.perf_counter_ns()
        sb, so = self._split(source)
        db, do = self._split(destination)
        for key, value in self._views:
            key[db, do] = key[sb, so]
            value[db, do] = value[sb, so]
        return (time.perf_counter_ns() - started) // 1000

    def contents(self, slots: Ints) -> Iterator[LayerBytes]:
        """The bytes of K and of V of the tokens in `slots` [n], in their order, layer by layer."""
        blocks, offsets = self._split(slots)
        for key, value in self._views:
            yield _bytes(key[blocks, offsets]), _bytes(value[blocks, offsets])

    def _split(self, slots: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(slots)
        return index // self._block_size, index % self._block_size


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    out: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).numpy()
    return out
