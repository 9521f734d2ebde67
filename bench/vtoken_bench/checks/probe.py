"""Check 5: the score probe of one layer against the attention kernel of that layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from vtoken.vllm.cuda.layout import page_view, slot_rows
from vtoken_bench.checks.cases import Shape, blocks_of, slots_of
from vtoken_bench.checks.measure import facts, median_us, share
from vtoken_bench.checks.pages import REFUSALS, kernels


def expected_scores(
    query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """The mean over heads of softmax(q k) [R, n], in float32 and plain torch."""
    dim = query.shape[2]
    rows = slot_rows(cache)
    heads = rows.shape[1] // (2 * dim)
    out = []
    for q, live in zip(query, slots, strict=True):
        key = rows[live.long()].view(len(live), heads, 2 * dim)[..., :dim].float()
        key = key.repeat_interleave(query.shape[1] // heads, dim=1)
        logits = torch.einsum("hd,nhd->hn", q.float(), key) * scale
        out.append(torch.softmax(logits, dim=-1).mean(dim=0))
    return torch.stack(out)


def run(
    device: torch.device,
    *,
    batches: tuple[int, ...] = (1, 16, 64),
    contexts: tuple[int, ...] = (2048, 8192),
    shape: Shape | None = None,
) -> dict[str, Any]:
    """µs of the probe and of the attention kernels over the same live slots.

    `failed`: by attention kernel, the error for which it is not in every row.
    """
    from vtoken.vllm.cuda.signals.probe_kernels import probe_scores

    shape = shape or Shape()
    torch.manual_seed(0)
    rows = []
    failed: dict[str, str] = {}
    for batch in batches:
        for context in contexts:
            blocks = blocks_of(batch, context, shape.block_size, device)
            cache = shape.cache(blocks.numel(), device)
            query = shape.query(batch, device)
            slots = slots_of(blocks, context, shape.block_size)
            lens = torch.full((batch,), context, dtype=torch.int32, device=device)
            heads = torch.arange(query.shape[1], dtype=torch.int32, device=device)
            each = torch.arange(batch, dtype=torch.int32, device=device)
            pages = page_view(cache)
            key = pages[:, :, 0, : shape.dim]
            scale = shape.dim**-0.5
            scores = torch.zeros((batch, context), device=device)
            probe = partial(
                probe_scores,
                scale=scale,
                queries=each,
                rows=each,
                heads=heads,
                sinks=torch.full((len(heads),), float("-inf"), device=device),
                divisor=len(heads),
            )
            probe(query, key, slots, lens, scores)
            error = scores[:1] - expected_scores(query[:1], cache, slots[:1], scale)
            us = median_us(partial(probe, query, key, slots, lens, scores), device)
            row: dict[str, Any] = {
                "batch": batch,
                "context": context,
                "max_error": float(error.abs().max()),
                "probe_us": us,
            }
            for name, prepare in kernels().items():
                try:
                    attention_us = median_us(prepare(query, pages, slots, lens), device)
                except REFUSALS as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                    continue
                row[f"attention_us, {name}"] = attention_us
                row[f"ratio, {name}"] = share(us, attention_us)
            rows.append(row)
    return {"check": "probe", "facts": facts(device), "rows": rows, "failed": failed}
