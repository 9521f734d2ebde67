"""The memory layout of K and V in the attention backend's cache, learned at start-up.

The CPU kernels store K transposed inside a block, differently per instruction set. So vToken writes
known values into a scratch block with the backend's own store operation and reads them back. It
refuses a layout that is not affine in (token, dimension).

A cache tensor is [N, H, S, 2D]; inside a head, K fills the first S * D elements and V the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops

from vtoken.base.arrays import Ints
from vtoken.base.errors import UnsupportedError

Bits = npt.NDArray[Any]  # uint32 or uint16: the raw elements of a cache


@dataclass(frozen=True, slots=True)
class Placement:
    """Element (token, dimension) is at `offset + token * token_stride + dim * dim_stride`."""

    offset: int
    token_stride: int
    dim_stride: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Placements of K and V inside one head of one block."""

    key: Placement
    value: Placement

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `cache` [N, H, S, 2D] as views [N, S, H, D] over the same memory."""
        n, h, s, two_d = cache.shape
        block, head = cache.stride(0), cache.stride(1)

        def view(place: Placement) -> torch.Tensor:
            return torch.as_strided(
                cache,
                (n, s, h, two_d // 2),
                (block, place.token_stride, head, place.dim_stride),
                cache.storage_offset() + place.offset,
            )

        return view(self.key), view(self.value)

    def memory(self, cache: torch.Tensor) -> Memory:
        """The memory of `cache` [N, H, S, 2D], for kernels."""
        n, h, s, two_d = cache.shape
        block, head = cache.stride(0), cache.stride(1)
        span = (n - 1) * block + (h - 1) * head + s * two_d
        flat = torch.as_strided(cache, (span,), (1,))
        size = cache.element_size()
        bits = flat.view(torch.int32 if size == 4 else torch.int16).numpy()
        k, v = self.key, self.value
        strides = (k.offset, k.token_stride, k.dim_stride, v.offset, v.token_stride, v.dim_stride)
        shape = np.array((n, h, s, two_d // 2, block, head, *strides), dtype=np.int64)
        return Memory(bits.view(np.uint32 if size == 4 else np.uint16), shape)


@dataclass(frozen=True, slots=True)
class Memory:
    """One cache tensor in the form that kernels take: they copy elements as bits of any type.

    `shape` [12]: N, H, S, D, the strides of a block and of a head, then the `Placement` of K and of
    V: offset, token stride, dimension stride. All are counted in elements of `bits`.

        element (slot, head, dim) of K = bits[(slot // S) * shape[4] + head * shape[5]
                                              + shape[6] + (slot % S) * shape[7] + dim * shape[8]]
    """

    bits: Bits
    shape: Ints

    def check(self, slots: Ints) -> None:
        """Raises IndexError for a slot outside the cache."""
        num_slots = int(self.shape[0] * self.shape[2])
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
            raise IndexError(f"slots {slots.min()} to {slots.max()}, but there are {num_slots}")

    def empty(self, num_tokens: int) -> Bits:
        """An empty array for K or V [n, H, D] of `num_tokens` tokens."""
        return np.empty((num_tokens, self.shape[1], self.shape[3]), dtype=self.bits.dtype)


def learn_layout(cache: torch.Tensor, isa: str) -> KVLayout:
    """The layout that the store operation of `isa` writes into caches shaped like `cache`.

    Raises UnsupportedError when the element order is not affine (for example AMX tiles).
    """
    _, heads, size, two_d = cache.shape
    dim = two_d // 2
    tokens = torch.arange(size).view(size, 1, 1).expand(size, heads, dim)
    dims = torch.arange(dim).view(1, 1, dim).expand(size, heads, dim)
    # Small integers survive every dtype; token and dimension are written in separate passes.
    read_back = [_write_and_read(cache, isa, pattern) for pattern in (tokens, dims)]
    placements = []
    for part in (0, 1):
        token_of, dim_of = (pass_[part] for pass_ in read_back)
        at = {key: place for place, key in enumerate(zip(token_of, dim_of, strict=True))}
        if len(at) != size * dim:
            raise UnsupportedError(f"the {isa} cache layout does not store every element once")
        origin = at[0, 0]
        placement = Placement(origin, at[1, 0] - origin, at[0, 1] - origin)
        for (t, d), place in at.items():
            if place != origin + t * placement.token_stride + d * placement.dim_stride:
                raise UnsupportedError(
                    f"the {isa} cache layout is not affine: element (token {t}, dim {d}) is at "
                    f"{place}; vToken cannot relocate single tokens in it"
                )
        placements.append(placement)
    key, value = placements
    half = size * dim
    return KVLayout(key, Placement(half + value.offset, value.token_stride, value.dim_stride))


def _write_and_read(
    cache: torch.Tensor, isa: str, pattern: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Store `pattern` [S, H, D] as K and V of one block; return head 0's elements of K and of V."""
    _, heads, size, two_d = cache.shape
    block = torch.full((1, heads, size, two_d), -1, dtype=cache.dtype)
    halves = block.view(1, heads, size * 2, -1).chunk(2, dim=2)
    values = pattern.to(cache.dtype).contiguous()
    ops.cpu_attn_reshape_and_cache(
        values,
        values,
        halves[0],
        halves[1],
        torch.arange(size, dtype=torch.int64),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    flat = block.view(heads, size * two_d)
    if not all(torch.equal(flat[0], flat[h]) for h in range(heads)):
        raise UnsupportedError(f"the {isa} cache layout differs between heads")
    memory = flat[0].to(torch.int64).tolist()
    return memory[: size * two_d // 2], memory[size * two_d // 2 :]
