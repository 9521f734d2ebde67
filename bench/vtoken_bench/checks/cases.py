"""Caches, page tables and the oracle that the checks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken.vllm.cuda.layout import page_view, slot_rows


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and block size; the defaults are Llama-3.1-8B's: 4 KiB a token and layer in bf16."""

    heads: int = 8
    query_heads: int = 32
    dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_bytes(self) -> int:
        return self.heads * 2 * self.dim * int(self.dtype.itemsize)

    def cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """A random cache [N, H, S, 2D] in vLLM's layout LBNHC."""
        memory = torch.randn(
            (num_blocks, self.block_size, self.heads, 2 * self.dim), device=device
        ).to(self.dtype)
        return memory.permute(0, 2, 1, 3)

    def query(self, requests: int, device: torch.device) -> torch.Tensor:
        return torch.randn((requests, self.query_heads, self.dim), device=device).to(self.dtype)


def oracle(query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Attention in float32 of `query` [R, Hq, D] over slots [R, n] of `cache`, in plain torch."""
    dim = query.shape[2]
    rows = slot_rows(cache)
    heads = rows.shape[1] // (2 * dim)
    out = []
    for q, live in zip(query, slots, strict=True):
        kv = rows[live.long()].view(len(live), heads, 2 * dim).float()
        key, value = kv.repeat_interleave(query.shape[1] // heads, dim=1).split(dim, dim=-1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q.float(), key) * dim**-0.5, dim=-1)
        out.append(torch.einsum("hn,nhd->hd", weights, value))
    return torch.stack(out).to(query.dtype)


def blocks_of(requests: int, context: int, size: int, device: torch.device) -> torch.Tensor:
    """A block table [R, m] int32 of blocks scattered over the cache."""
    per_request = -(-context // size)
    order = torch.randperm(requests * per_request, device=device)
    return order.view(requests, per_request).to(torch.int32)


def slots_of(blocks: torch.Tensor, context: int, size: int) -> torch.Tensor:
    """The slots [R, context] int32 that `blocks` [R, m] address, in order."""
    offsets = torch.arange(size, dtype=torch.int32, device=blocks.device)
    slots = (blocks[:, :, None] * size + offsets).reshape(len(blocks), -1)
    return slots[:, :context].contiguous()


def scatter(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens at random places: a new cache, and their slots [R, n] int32 in it."""
    pages = page_view(cache)
    places = torch.randperm(pages.shape[0], device=cache.device)[: slots.numel()]
    moved = cache.clone(memory_format=torch.preserve_format)
    page_view(moved)[places] = pages[slots.flatten().long()]
    return moved, places.view(slots.shape).to(torch.int32)
