"""A small paged decode attention in Triton, measured also where no serving kernel is installed.

One query a request, with a block lookup for every token, like vLLM's Triton attention. Split over
the context; the parts are merged in torch. Never used for serving.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _decode_kernel(
    query,  # [R, Hq, D]
    key,  # [pages, PAGE, H, D] by strides, value alike
    value,
    table,  # [R, m] int32
    seq_lens,
    out,  # [R, Hq, splits, D] float32
    top,  # [R, Hq, splits]
    total,
    scale,
    page_stride,
    token_stride,
    head_stride,
    table_row,
    split_tokens,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(seq_lens + request)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, length)
    member = tl.arange(0, GROUP_PAD)
    q_head = head * GROUP + member
    dim = tl.arange(0, D)
    q_row = request * tl.num_programs(1) * GROUP + q_head
    is_head = member < GROUP
    q = tl.load(query + q_row[:, None] * D + dim[None, :], mask=is_head[:, None], other=0.0)
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    norm = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D), tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        live = token < end
        page = tl.load(table + request * table_row + token // PAGE, mask=live, other=0)
        place = page.to(tl.int64) * page_stride + (token % PAGE) * token_stride
        at = place[:, None] + head * head_stride + dim[None, :]
        k = tl.load(key + at, mask=live[:, None], other=0.0)
        v = tl.load(value + at, mask=live[:, None], other=0.0)
        x = tl.dot(q, tl.trans(k)) * scale
        x = tl.where(live[None, :], x, float("-inf"))
        new = tl.maximum(best, tl.max(x, axis=1))
        weight = tl.exp(x - new[:, None])
        old = tl.exp(best - new)
        norm = norm * old + tl.sum(weight, axis=1)
        acc = acc * old[:, None] + tl.dot(weight.to(v.dtype), v)
        best = new
    row = q_row * splits + split
    tl.store(out + row[:, None] * D + dim[None, :], acc, mask=is_head[:, None])
    tl.store(top + row, best, mask=is_head)
    tl.store(total + row, norm, mask=is_head)


def paged_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    splits: int = 16,
    tile: int = 32,
) -> torch.Tensor:
    """Attention of `query` [R, Hq, D] over `cache` [N, H, S, 2D] (S may be 1), [R, Hq, D].

    `table` [R, m] int32 addresses pages of S tokens; every length in `seq_lens` [R] is positive.
    """
    requests, heads, dim = query.shape
    key, value = cache.transpose(1, 2).split(dim, dim=-1)
    page = key.shape[1]
    longest = table.shape[1] * page
    split_tokens = triton.cdiv(triton.cdiv(longest, splits), tile) * tile
    shape = (requests, heads, splits)
    out = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
    top = torch.empty(shape, dtype=torch.float32, device=query.device)
    total = torch.empty_like(top)
    group = heads // key.shape[2]
    _decode_kernel[(requests, key.shape[2], splits)](
        query,
        key,
        value,
        table,
        seq_lens,
        out,
        top,
        total,
        dim**-0.5,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        table.stride(0),
        split_tokens,
        PAGE=page,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        D=dim,
        TILE=tile,
    )
    weight = torch.exp(top - top.amax(dim=-1, keepdim=True))
    norm = (total * weight).sum(dim=-1, keepdim=True)
    merged = (out * weight.unsqueeze(-1)).sum(dim=2) / norm
    return merged.to(query.dtype)
