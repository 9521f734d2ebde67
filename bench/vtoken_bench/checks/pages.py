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
from vtoken_bench.checks.measure import captured, ceiling_gbs, facts, gbs, median_us, share

Call = Callable[[], torch.Tensor]
Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Call]
HOPPER = 9  # compute capability; FlashAttention 3 is built for no other
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)  # errors of a refusing kernel


def stand_in() -> Prepare:
    from vtoken_bench.checks.decode import paged_decode

    return partial(partial, paged_decode)


def flash_attention_3() -> Prepare | None:
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

    def prepare(
        query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
    ) -> Call:
        key, value = cache.transpose(1, 2).split(query.shape[2], dim=-1)
        if not of_vllm:
            return lambda: function(
                query[:, None], key, value, cache_seqlens=lens, page_table=table, causal=True
            ).flatten(0, 1)
        return partial(
            function,
            q=query,
            k=key,
            v=value,
            max_seqlen_q=1,
            cu_seqlens_q=_starts(query),
            max_seqlen_k=table.shape[1] * key.shape[1],
            seqused_k=lens,
            block_table=table,
            causal=True,
            fa_version=3,
        )

    return prepare


def triton_attention() -> Prepare | None:
    """vLLM's Triton attention, with its backend's scratch and thresholds; None without vLLM."""
    try:
        backend: Any = import_module("vllm.v1.attention.backends.triton_attn")
    except ImportError:
        return None

    def prepare(
        query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
    ) -> Call:
        requests, heads, dim = query.shape
        key, value = cache.transpose(1, 2).split(dim, dim=-1)
        few = backend.MIN_LAUNCH_GRID_SIZE_2D // key.shape[2]  # requests; else no split is needed
        segments = backend.NUM_PAR_SOFTMAX_SEGMENTS
        parts = torch.empty((few, heads, segments, dim), device=query.device)
        scales = torch.ones((requests, key.shape[2]), device=query.device)
        out = torch.empty_like(query)
        attend = partial(
            backend.unified_attention,
            q=query,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=_starts(query),
            max_seqlen_q=1,
            seqused_k=lens,
            max_seqlen_k=table.shape[1] * key.shape[1],
            softmax_scale=dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=scales,
            v_descale=scales,
            seq_threshold_3D=few,
            num_par_softmax_segments=segments,
            softmax_segm_output=parts,
            softmax_segm_max=torch.empty_like(parts[..., 0]),
            softmax_segm_expsum=torch.empty_like(parts[..., 0]),
        )

        def call() -> torch.Tensor:
            attend()
            return out

        return call

    return prepare


def _starts(query: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)


def kernels() -> dict[str, Prepare]:
    """The installed attention kernels by name."""
    cuda = torch.cuda.is_available()
    hopper = cuda and torch.cuda.get_device_capability()[0] == HOPPER
    found = {
        "triton stand-in": stand_in(),
        "vLLM's triton": triton_attention() if cuda else None,
        "flash attention 3": flash_attention_3() if hopper else None,
    }
    return {name: prepare for name, prepare in found.items() if prepare is not None}


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
    for name, prepare in kernels().items():
        try:
            for batch, context in product(batches, contexts):
                rows.append(_case(name, prepare, batch, context, shape, device, ceiling))
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
    prepare: Prepare,
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
    calls = {name: prepare(query, c, table, lens) for name, (c, table) in variants.items()}
    outputs = {name: call() for name, call in calls.items()}
    expected = oracle(query[:1], cache, slots[:1]).float()
    first = outputs["page 1, blocks in order"]
    row: dict[str, Any] = {
        "kernel": kernel,
        "batch": batch,
        "context": context,
        "max_error": max(float((o[:1].float() - expected).abs().max()) for o in outputs.values()),
        "equal_bits_scattered": torch.equal(first, outputs["page 1, scattered"]),
        "equal_bits_block_size": torch.equal(first, outputs[f"page {size}"]),
        **_replayed(prepare, query, cache, slots),
    }
    read = batch * context * shape.row_bytes
    times = {name: median_us(call, device) for name, call in calls.items()}
    base = times[f"page {size}"]
    row["us"] = times
    row["ratio_to_block_size"] = {name: share(us, base) for name, us in times.items()}
    row["share_of_ceiling"] = {name: share(gbs(read, us), ceiling) for name, us in times.items()}
    return row


def _replayed(
    prepare: Prepare, query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> dict[str, bool]:
    """Equality of bits between a graph's replay and a call without a graph, page size 1.

    As in serving, the graph is captured with requests of one token, and its page table and lengths
    are then overwritten in place: with the slots of requests without holes, and with those that an
    eviction leaves, another number for each request.
    """
    device = slots.device
    lengths = torch.full((len(slots),), slots.shape[1], dtype=torch.int32, device=device)
    live = torch.rand(slots.shape, device=device) < 0.5
    live[:, -1] = True
    order = torch.argsort(~live, dim=1, stable=True)
    batches = {
        "dense": (slots, lengths),
        "holes": (slots.gather(1, order), live.sum(1, dtype=torch.int32)),
    }
    table, seen = torch.zeros_like(slots), torch.ones_like(lengths)
    call = prepare(query, page_view(cache), table, seen)
    call()
    replay = captured(call, device)
    found = {}
    for name, (pages, live_tokens) in batches.items():
        table.copy_(pages)
        seen.copy_(live_tokens)
        again = replay().clone()
        direct = prepare(query, page_view(cache), pages, live_tokens)()
        found[f"equal_bits_replayed_{name}"] = torch.equal(again, direct)
    return found
