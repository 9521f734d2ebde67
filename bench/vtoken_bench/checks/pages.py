"""Checks 1 and 2: decode attention at page size 1 against 16; equal bits for any placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch

from vtoken.vllm.cuda.layout import page_view
from vtoken_bench.checks.cases import Shape, blocks_of, oracle, scatter, slots_of
from vtoken_bench.checks.measure import ceiling_gbs, facts, gbs, median_us, share

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HOPPER = 9  # compute capability; FlashAttention 3 is built for no other
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)  # errors of a refusing kernel


def flash_attention_3() -> Attend | None:
    """FlashAttention 3 of vLLM, or of the flash-attn-3 wheel; None when neither is installed."""
    try:
        function: Any = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
        of_vllm = True
    except (ImportError, AttributeError):
        try:
            function = import_module("flash_attn_interface").flash_attn_with_kvcache
            of_vllm = False
        except ImportError:
            return None

    def attend(
        query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        key, value = cache.transpose(1, 2).split(query.shape[2], dim=-1)
        if not of_vllm:
            out: torch.Tensor = function(
                query[:, None], key, value, cache_seqlens=lens, page_table=table, causal=True
            )
            return out.flatten(0, 1)
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        varlen: torch.Tensor = function(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=table.shape[1] * key.shape[1],
            seqused_k=lens,
            block_table=table,
            causal=True,
            fa_version=3,
        )
        return varlen

    return attend


def kernels() -> dict[str, Attend]:
    """The installed attention kernels by name."""
    from vtoken_bench.checks.decode import paged_decode

    found: dict[str, Attend] = {"triton stand-in": paged_decode}
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER
    flash = flash_attention_3() if hopper else None
    if flash is not None:
        found["flash attention 3"] = flash
    return found


def run(
    device: torch.device,
    *,
    batches: tuple[int, ...] = (1, 16, 64),
    contexts: tuple[int, ...] = (2048, 8192, 16384),
    shape: Shape | None = None,
) -> dict[str, Any]:
    """Rows of times, each with the largest difference from the oracle and equality of bits.

    `failed`: by kernel, the error after which it has no further rows.
    """
    shape = shape or Shape()
    torch.manual_seed(0)
    ceiling = ceiling_gbs(device)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name, attend in kernels().items():
        try:
            for batch, context in product(batches, contexts):
                rows.append(_case(name, attend, batch, context, shape, device, ceiling))
        except REFUSALS as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return {
        "check": "pages",
        "facts": facts(device),
        "ceiling_gbs": ceiling,
        "rows": rows,
        "failed": failed,
    }


def _case(
    kernel: str,
    attend: Attend,
    batch: int,
    context: int,
    shape: Shape,
    device: torch.device,
    ceiling: float | None,
) -> dict[str, Any]:
    size = shape.block_size
    blocks = blocks_of(batch, context, size, device)
    cache = shape.cache(blocks.numel(), device)
    query = shape.query(batch, device)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    slots = slots_of(blocks, context, size)
    moved, places = scatter(cache, slots)
    variants = {
        f"page {size}": (cache, blocks),
        "page 1, blocks in order": (page_view(cache), slots),
        "page 1, scattered": (page_view(moved), places),
    }
    outputs = {name: attend(query, c, table, lens) for name, (c, table) in variants.items()}
    expected = oracle(query[:1], cache, slots[:1]).float()
    first = outputs["page 1, blocks in order"]
    row: dict[str, Any] = {
        "kernel": kernel,
        "batch": batch,
        "context": context,
        "max_error": max(float((o[:1].float() - expected).abs().max()) for o in outputs.values()),
        "equal_bits_scattered": torch.equal(first, outputs["page 1, scattered"]),
        "equal_bits_block_size": torch.equal(first, outputs[f"page {size}"]),
    }
    read = batch * context * shape.row_bytes
    times = {
        name: median_us(partial(attend, query, c, table, lens), device)
        for name, (c, table) in variants.items()
    }
    base = times[f"page {size}"]
    row["us"] = times
    row["ratio_to_block_size"] = {name: share(us, base) for name, us in times.items()}
    row["share_of_ceiling"] = {name: share(gbs(read, us), ceiling) for name, us in times.items()}
    return row
