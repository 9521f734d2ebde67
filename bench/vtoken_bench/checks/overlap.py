"""Check 4: copies on their own stream between two forwards, without a host synchronisation."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.streams import CUDAStreams, Streams
from vtoken.vllm.cuda.layout import slot_rows
from vtoken_bench.checks.cases import Shape
from vtoken_bench.checks.measure import facts

SYNCS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


class Server:
    """Steps of a simulated server: matmuls, a read of the relocated tokens, then sampling."""

    def __init__(self, device: torch.device, layers: int, tokens: int, width: int) -> None:
        self.device, self.tokens = device, tokens
        shape = Shape()
        blocks = -(-4 * tokens // shape.block_size)
        memory = torch.randn(
            (layers, blocks, shape.block_size, shape.heads, 2 * shape.dim),
            dtype=torch.bfloat16,
            device=device,
        )
        self.caches = [layer.permute(0, 2, 1, 3) for layer in memory]
        self.rows = [slot_rows(cache) for cache in self.caches]
        self.weight = torch.randn((width, width), dtype=torch.bfloat16, device=device) / width**0.5
        self.hidden = torch.randn((64, width), dtype=torch.bfloat16, device=device)
        self.slots = np.random.default_rng(0).permutation(blocks * shape.block_size)

    def engine(self, *, sync: bool) -> CUDACopyEngine:
        on_cuda = self.device.type == "cuda"
        streams: Streams = CUDAStreams(self.device) if on_cuda else Streams()
        return CUDACopyEngine(self.caches, streams, use_triton=on_cuda, sync=sync)

    def step(self, number: int, engine: CUDACopyEngine | None) -> None:
        half = (number % 2) * self.tokens
        source = self.slots[half : half + self.tokens]
        target = self.slots[self.tokens - half : 2 * self.tokens - half]
        if engine is not None:
            engine.copy(source, target)
        torch.randn(1024, 64, device=self.device)  # inputs
        if engine is not None:
            engine.stages.guard()
        hidden = self.hidden
        for _ in self.rows:
            hidden = hidden @ self.weight
        if engine is not None:
            self.rows[-1][int(target[0])].sum()  # attention reads the relocated tokens
            engine.stages.forward_ended()
        torch.argmax(hidden, dim=-1)  # sampling


def run(
    device: torch.device,
    *,
    layers: int = 32,
    tokens: int = 4096,
    steps: int = 50,
    width: int = 4096,
) -> dict[str, Any]:
    """Step times without copies, with copies on their own stream, and with the host waiting."""
    server = Server(device, layers, tokens, width)
    rows = []
    for name, engine in (
        ("no copies", None),
        ("own stream", server.engine(sync=False)),
        ("host waits", server.engine(sync=True)),
    ):
        for number in range(4):
            server.step(number, engine)
        _wait(device)
        syncs = _count_syncs(server, engine, device)
        started = time.perf_counter()
        host_us = []
        for number in range(steps):
            entered = time.perf_counter()
            server.step(number, engine)
            host_us.append((time.perf_counter() - entered) * 1e6)
        _wait(device)
        elapsed_us = (time.perf_counter() - started) * 1e6 / steps
        on_cuda = device.type == "cuda"
        rows.append(
            {
                "variant": name,
                "step_us": elapsed_us if on_cuda else None,
                "host_us": statistics.median(host_us) if on_cuda else None,
                "host_synchronisations_in_4_steps": syncs,
            }
        )
    return {"check": "overlap", "facts": facts(device), "tokens": tokens, "rows": rows}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _count_syncs(server: Server, engine: CUDACopyEngine | None, device: torch.device) -> int | None:
    """The CUDA calls in four steps that make the host wait, counted by torch's profiler."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiled:
        for number in range(4):
            server.step(number, engine)
    counts = {event.key: event.count for event in profiled.key_averages()}
    syncs = sum(int(counts.get(name, 0)) for name in SYNCS)
    _wait(device)
    return syncs - 1 if counts.get("cudaDeviceSynchronize") else syncs  # less the profiler's own
