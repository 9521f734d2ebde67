"""Check 3: relocation of token slots over all layers, against the device's copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vtoken.vllm.cuda.copies.copy_engine import TorchSlotCopy
from vtoken.vllm.cuda.layout import slot_rows
from vtoken_bench.checks.cases import Shape
from vtoken_bench.checks.measure import ceiling_gbs, facts, gbs, median_us, share


def run(
    device: torch.device,
    *,
    layers: int = 32,
    tokens: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536),
    shape: Shape | None = None,
) -> dict[str, Any]:
    """GB/s read and written over `layers` in one launch, and whether every row is copied."""
    from vtoken.vllm.cuda.kernels import TritonSlotCopy

    shape = shape or Shape()
    torch.manual_seed(0)
    ceiling = ceiling_gbs(device)
    size = shape.block_size
    num_blocks = -(-2 * max(tokens) // size)
    memory = torch.randn(
        (layers, num_blocks, size, shape.heads, 2 * shape.dim), dtype=torch.bfloat16, device=device
    )
    slots = [slot_rows(layer.permute(0, 2, 1, 3)) for layer in memory]
    implementations: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
        "triton": TritonSlotCopy(slots),
        "torch": TorchSlotCopy(slots),
    }
    rows = []
    for number in tokens:
        order = torch.randperm(num_blocks * size, device=device)
        source, target = order[:number], order[number : 2 * number]
        moved = 2 * number * layers * shape.row_bytes
        row: dict[str, Any] = {"tokens": number}
        for name, copy in implementations.items():
            for of_layer in slots:
                of_layer[target] = 0
            copy(source, target)
            row[f"{name}_exact"] = all(
                torch.equal(of_layer[source], of_layer[target]) for of_layer in slots
            )
            us = median_us(partial(copy, source, target), device)
            row[name] = {"us": us, "gbs": gbs(moved, us), "share": share(gbs(moved, us), ceiling)}
        rows.append(row)
    return {
        "check": "copies",
        "facts": facts(device),
        "ceiling_gbs": ceiling,
        "layers": layers,
        "bytes_a_token_and_layer": shape.row_bytes,
        "rows": rows,
    }
