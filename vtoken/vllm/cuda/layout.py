"""The KV cache on CUDA as one row a slot: only vLLM's layout LBNHC.

A layer's cache is logically [N, H, S, C]; C holds a token's K and then its V, of one head. In LBNHC
the memory order is block, token, head, content, so that

    slot s = block * S + offset is at s * H * C, for every s          (one row a token)

Copying single tokens, and reading them through a page table of page size 1, need this. A cache with
other strides is refused, because a token's heads, or a layer's blocks, are not contiguous in it.
"""

from __future__ import annotations

import torch

from vtoken.base.errors import UnsupportedError


def check_layout(cache: torch.Tensor) -> None:
    """Raises UnsupportedError unless `cache` [N, H, S, C] has one contiguous row a slot."""
    if cache.dim() != 4:
        raise UnsupportedError(f"a KV cache with {cache.dim()} dimensions, not 4: [N, H, S, C]")
    _, heads, size, content = cache.shape
    row = heads * content
    expected = (size * row, content, row, 1)
    if any(
        have != want and length > 1
        for have, want, length in zip(cache.stride(), expected, cache.shape, strict=True)
    ):
        raise UnsupportedError(
            f"a KV cache of shape {tuple(cache.shape)} with strides {cache.stride()}: vToken needs "
            f"{expected}, vLLM's layout LBNHC (--kv-cache-layout LBNHC)"
        )


def slot_rows(cache: torch.Tensor) -> torch.Tensor:
    """`cache` [N, H, S, C] as one row a slot [N * S, H * C], over the same memory."""
    check_layout(cache)
    blocks, heads, size, content = cache.shape
    row = heads * content
    return cache.as_strided((blocks * size, row), (row, 1))


def page_view(cache: torch.Tensor) -> torch.Tensor:
    """`cache` [N, H, S, C] with page size 1: [N * S, H, 1, C], over the same memory.

    The dimension of length 1 has the canonical stride of [N * S, 1, H, C], which the kernels read.
    """
    check_layout(cache)
    blocks, heads, size, content = cache.shape
    row = heads * content
    return cache.as_strided((blocks * size, heads, 1, content), (row, content, row, 1))


def keys_of(cache: torch.Tensor) -> torch.Tensor:
    """The keys [N, S, H, D] in `cache` [N, H, S, 2D], over the same memory."""
    return cache.transpose(1, 2)[..., : cache.shape[-1] // 2]
