"""Relocation of tokens inside the KV cache: one gather, then one scatter, layer by layer.

Works on slots and tensors, not on requests. All sources of a layer are read before any destination
is written, so the order of the copies does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vtoken.base.arrays import Ints
from vtoken.base.compiled import kernel
from vtoken.core.protocol.integrity import LayerBytes
from vtoken.vllm.cpu.layout import Bits, KVLayout, Memory

KEY, VALUE = 6, 9  # offsets of their placements in `Memory.shape`


class CPUCopyEngine:
    """Copies K and V of token slots on the host, before the step's forward."""

    def __init__(self, caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self.layers = [layout.memory(cache) for cache in caches]

    def copy(self, source: Ints, destination: Ints) -> int:
        """Copy `source` [k] to `destination` [k] in every layer; return the time taken in µs.

        Raises IndexError for a slot outside the cache.
        """
        started = time.perf_counter_ns()
        first = self.layers[0]
        first.check(source)
        first.check(destination)
        keys, values = (first.empty(len(source)) for _ in range(2))
        for layer in self.layers:
            for part, staged in ((KEY, keys), (VALUE, values)):
                read_tokens(layer.bits, layer.shape, part, source, staged)
            for part, staged in ((KEY, keys), (VALUE, values)):
                write_tokens(layer.bits, layer.shape, part, destination, staged)
        return (time.perf_counter_ns() - started) // 1000

    def contents(self, slots: Ints) -> Iterator[LayerBytes]:
        """The bytes of K and of V of the tokens in `slots` [n], in that order, layer by layer."""
        self.layers[0].check(slots)
        for layer in self.layers:
            yield _bytes(layer, KEY, slots), _bytes(layer, VALUE, slots)


def _bytes(layer: Memory, part: int, slots: Ints) -> npt.NDArray[np.uint8]:
    staged = layer.empty(len(slots))
    read_tokens(layer.bits, layer.shape, part, slots, staged)
    return staged.view(np.uint8)


@kernel
def read_tokens(bits: Bits, shape: Ints, part: int, slots: Ints, staged: Bits) -> None:
    """`staged` [n, H, D] = K or V of the tokens in `slots` [n]; `part`: KEY or VALUE."""
    token_stride, dim_stride = shape[part + 1], shape[part + 2]
    for i in range(len(slots)):
        at = slots[i] // shape[2] * shape[4] + shape[part] + slots[i] % shape[2] * token_stride
        for h in range(shape[1]):
            token = bits[at + h * shape[5] :]
            for d in range(shape[3]):
                staged[i, h, d] = token[d * dim_stride]


@kernel
def write_tokens(bits: Bits, shape: Ints, part: int, slots: Ints, staged: Bits) -> None:
    """K or V of the tokens in `slots` [n] = `staged` [n, H, D]."""
    token_stride, dim_stride = shape[part + 1], shape[part + 2]
    for i in range(len(slots)):
        at = slots[i] // shape[2] * shape[4] + shape[part] + slots[i] % shape[2] * token_stride
        for h in range(shape[1]):
            token = bits[at + h * shape[5] :]
            for d in range(shape[3]):
                token[d * dim_stride] = staged[i, h, d]
