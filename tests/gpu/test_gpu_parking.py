"""Check 7 of docs/gpu.md: parked tokens return unchanged, ordered by events, and no host waits."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import torch

from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.host_copies import CUDAHostCopies
from vtoken.vllm.cuda.copies.streams import CUDAStreams, Stream
from vtoken.vllm.cuda.layout import slot_rows
from vtoken_bench.checks import parking

LAYERS, BLOCKS, S = 4, 512, 16
STEPS = 200


def test_every_row_returns_although_its_slot_was_overwritten(cuda: torch.device) -> None:
    for row in parking.run(cuda, layers=8, tokens=(1, 5, 4096), repeats=2)["rows"]:
        assert row["returned_exact"]


class Hasty(CUDAStreams):
    """Streams of which some wait for no event."""

    def __init__(self, device: torch.device, hasty: Container[Stream]) -> None:
        super().__init__(device)
        self._hasty = hasty

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        if stream not in self._hasty:
            super().wait(stream, event)


def lost(cuda: torch.device, hasty: Container[Stream] = ()) -> int:
    """Send one token to the host and back in each step, while long forwards change it in its slots
    and use its memory there again; return the forwards that read another number than the last.
    """
    memory = torch.zeros((LAYERS, BLOCKS, S, 2, 16), device=cuda)
    caches = [layer.permute(0, 2, 1, 3) for layer in memory]
    streams = Hasty(cuda, hasty)
    engine = CUDACopyEngine(caches, streams, use_triton=True)
    host = CUDAHostCopies(caches, engine.stages, streams, use_triton=True)
    rows = [slot_rows(cache) for cache in caches]
    weight = torch.randn((2048, 2048), device=cuda)
    seen = []
    for number in range(STEPS):
        rows[0][number] += 1  # forward n writes where the token is …
        for _ in range(4):
            weight @ weight
        engine.stages.forward_ended()
        host.park(np.array([number]), np.array([number % 2]))
        engine.copy(np.array([BLOCKS * S - 1]), np.array([number]))  # what it leaves is used
        host.restore(np.array([number % 2]), np.array([number + 1]))
        engine.stages.guard()
        seen.append(rows[0][number + 1, 0].clone())  # … and forward n + 1 reads where it returned
    torch.cuda.synchronize(cuda)
    return sum(int(value) != number + 1 for number, value in enumerate(torch.stack(seen).tolist()))


def test_attention_reads_every_restored_token_after_its_copies(cuda: torch.device) -> None:
    assert lost(cuda) == 0


def test_without_any_wait_of_one_stream_reads_are_wrong_and_are_noticed(
    cuda: torch.device,
) -> None:
    for stream in (Stream.PARK, Stream.RELOCATION, Stream.MAIN):
        assert lost(cuda, hasty={stream}) > 0


def test_a_step_that_parks_and_restores_does_not_make_the_host_wait(cuda: torch.device) -> None:
    memory = torch.zeros((LAYERS, BLOCKS, S, 2, 16), device=cuda)
    caches = [layer.permute(0, 2, 1, 3) for layer in memory]
    engine = CUDACopyEngine(caches, streams := CUDAStreams(cuda), use_triton=True)
    host = CUDAHostCopies(caches, engine.stages, streams, use_triton=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            host.park(np.arange(50), np.arange(50))
            host.restore(np.arange(50), np.arange(100, 150))
            engine.stages.guard()
            engine.stages.forward_ended()
    finally:
        torch.cuda.set_sync_debug_mode("default")
