"""Checks 3 and 4 of docs/gpu.md: copies are exact, ordered by events, and the host never waits."""

from __future__ import annotations

import numpy as np
import torch

from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine
from vtoken.vllm.cuda.copies.streams import CUDAStreams
from vtoken.vllm.cuda.layout import slot_rows
from vtoken_bench.checks import copies, overlap

LAYERS, BLOCKS, S = 4, 512, 16


def test_both_ways_of_copying_move_every_row_of_every_layer(cuda: torch.device) -> None:
    for row in copies.run(cuda, layers=8, tokens=(1, 5, 4096))["rows"]:
        assert row["triton_exact"]
        assert row["torch_exact"]


def chain(cuda: torch.device, *, guarded: bool) -> int:
    """Move one token 200 times, each after a long forward changed it; return the lost reads."""
    memory = torch.zeros((LAYERS, BLOCKS, S, 2, 16), device=cuda)
    caches = [layer.permute(0, 2, 1, 3) for layer in memory]
    engine = CUDACopyEngine(caches, CUDAStreams(cuda), use_triton=True)
    rows = [slot_rows(cache) for cache in caches]
    weight = torch.randn((2048, 2048), device=cuda)
    seen = []
    for number in range(200):
        rows[0][number] += 1  # forward n writes where the token is …
        for _ in range(4):
            weight @ weight
        engine.stages.forward_ended()
        engine.copy(np.array([number]), np.array([number + 1]))
        if guarded:
            engine.stages.guard()
        seen.append(rows[0][number + 1, 0].clone())  # … and forward n + 1 reads where it went
    torch.cuda.synchronize(cuda)
    return sum(int(value) != number + 1 for number, value in enumerate(torch.stack(seen).tolist()))


def test_attention_reads_every_relocated_token_after_its_copy(cuda: torch.device) -> None:
    assert chain(cuda, guarded=True) == 0


def test_without_the_guard_reads_are_too_early_and_are_noticed(cuda: torch.device) -> None:
    assert chain(cuda, guarded=False) > 0


def test_only_the_ablation_makes_the_host_wait(cuda: torch.device) -> None:
    rows = {row["variant"]: row for row in overlap.run(cuda, steps=8)["rows"]}
    counts = {name: row["host_synchronisations_in_4_steps"] for name, row in rows.items()}
    assert counts["own stream"] == counts["no copies"]
    assert counts["host waits"] >= counts["own stream"] + 4
