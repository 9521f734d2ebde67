"""Check 7: tokens to memory of the host and back, with relocations between, against the bus."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from vtoken.base.arrays import Ints
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.host_copies import CUDAHostCopies
from vtoken.vllm.cuda.copies.streams import CUDAStreams, Streams
from vtoken.vllm.cuda.layout import slot_rows
from vtoken_bench.checks.cases import Shape
from vtoken_bench.checks.measure import facts, gbs, share

CEILING_BYTES = 256 << 20


def run(
    device: torch.device,
    *,
    layers: int = 32,
    tokens: tuple[int, ...] = (64, 512, 4096),
    repeats: int = 7,
    shape: Shape | None = None,
) -> dict[str, Any]:
    """Of host slots in order and scattered: whether every row comes back, and, each way, µs for
    1,000 tokens until the copy is complete, µs of the host until it is launched, and the share of
    one large copy's GB/s. Times are medians; None on a CPU.
    """
    shape = shape or Shape()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    num_blocks = -(-4 * max(tokens) // shape.block_size)
    caches = [shape.cache(num_blocks, device) for _ in range(layers)]
    slots = [slot_rows(cache) for cache in caches]
    on_cuda = device.type == "cuda"
    streams: Streams = CUDAStreams(device) if on_cuda else Streams()
    engine = CUDACopyEngine(caches, streams, use_triton=True)
    host = CUDAHostCopies(caches, engine.stages, streams, use_triton=True)
    ceilings = _ceilings_gbs(device)
    rows = []
    for number in tokens:
        for name, hosts in (
            ("in order", np.arange(number)),
            ("scattered", 2 * rng.permutation(number)),  # no two follow one another
        ):
            order = rng.permutation(num_blocks * shape.block_size)
            parked, stays, back = order[: 3 * number].reshape(3, number)
            exact, times = True, []
            for _ in range(repeats + 1):
                before = [layer[_at(parked, device)].clone() for layer in slots]
                away = _timed(partial(host.park, parked, hosts), device)
                engine.copy(stays, parked)  # overwrites what was parked
                home = _timed(partial(host.restore, hosts, back), device)
                engine.stages.guard()
                exact = exact and all(
                    torch.equal(layer[_at(back, device)], old)
                    for layer, old in zip(slots, before, strict=True)
                )
                engine.stages.forward_ended()
                times.append((away, home))
            row: dict[str, Any] = {"tokens": number, "host slots": name, "returned_exact": exact}
            moved = number * layers * shape.row_bytes
            for way, ceiling, found in zip(
                ("park", "restore"), ceilings, zip(*times[1:], strict=True), strict=True
            ):
                launched, complete = map(statistics.median, zip(*found, strict=True))
                row[way] = {
                    "us_for_1000_tokens": complete * 1000 / number if on_cuda else None,
                    "host_us": launched if on_cuda else None,
                    "share": share(gbs(moved, complete if on_cuda else None), ceiling),
                }
            rows.append(row)
    return {
        "check": "parking",
        "facts": facts(device),
        "ceilings_gbs": dict(zip(("to the host", "to the device"), ceilings, strict=True)),
        "layers": layers,
        "bytes_a_token": layers * shape.row_bytes,
        "rows": rows,
    }


def _at(slots: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(slots).to(device)


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """µs until `work` is launched, and until it is complete on an idle device."""
    _wait(device)
    started = time.perf_counter()
    work()
    launched = time.perf_counter()
    _wait(device)
    return (launched - started) * 1e6, (time.perf_counter() - started) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ceilings_gbs(device: torch.device) -> tuple[float | None, float | None]:
    """GB/s of one large copy to page-locked memory of the host, and of one from there."""
    if device.type != "cuda":
        return None, None
    memory = torch.empty(CEILING_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(memory, device=device)

    def us(work: Callable[[], Any]) -> float:
        return statistics.median(_timed(work, device)[1] for _ in range(7))

    return (
        gbs(CEILING_BYTES, us(lambda: memory.copy_(there, non_blocking=True))),
        gbs(CEILING_BYTES, us(lambda: there.copy_(memory, non_blocking=True))),
    )
