"""The CUDA copy engine up to the device calls. `test_cuda_late.py` has the order of streams."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vtoken.base.errors import InvariantViolation, UnsupportedError
from vtoken.vllm.cuda.copies.copy_engine import CUDACopyEngine, TorchSlotCopy
from vtoken.vllm.cuda.copies.streams import Streams
from vtoken.vllm.cuda.layout import page_view, slot_rows

N, H, S, D, LAYERS = 6, 2, 16, 8, 3


def make_caches() -> list[torch.Tensor]:
    """[N, H, S, 2D] a layer in LBNHC, random."""
    torch.manual_seed(0)
    return [layer.permute(0, 2, 1, 3) for layer in torch.randn(LAYERS, N, S, H, 2 * D)]


@pytest.mark.parametrize("limit", [1 << 28, 3 * H * 2 * D * 4], ids=["whole", "chunks"])
def test_a_copy_moves_every_layer_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("vtoken.vllm.cuda.copies.copy_engine.MAX_GATHERED_BYTES", limit)
    caches = make_caches()
    before = [cache.clone() for cache in caches]
    order = torch.randperm(N * S)
    source, destination = order[:20], order[40:60]
    TorchSlotCopy([slot_rows(cache) for cache in caches])(source, destination)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        for s, d in zip(source.tolist(), destination.tolist(), strict=True):
            expected[d // S, :, d % S] = old[s // S, :, s % S]
        assert torch.equal(cache, expected)


def test_tokens_may_change_places_while_they_can_be_gathered_at_once() -> None:
    caches = make_caches()
    before = [slot_rows(cache).clone() for cache in caches]
    engine = CUDACopyEngine(caches, Streams(), use_triton=False)
    engine._direct = lambda *_: pytest.fail("a kernel without an order must not be used here")
    engine.copy(np.array([3, 50]), np.array([50, 3]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(slot_rows(cache)[[3, 50]], old[[50, 3]])
    engine._gathering.chunk = 1
    with pytest.raises(InvariantViolation, match="overwrite one another"):
        engine.copy(np.array([3, 50]), np.array([50, 3]))


def test_contents_are_read_after_the_copies_and_in_the_requested_order() -> None:
    caches = make_caches()
    source, destination = np.array([3, 50]), np.array([90, 17])
    before = [cache.clone() for cache in caches]
    engine = CUDACopyEngine(caches, Streams(), use_triton=False)
    engine.copy(source, destination)
    for cache, (key, value) in zip(before, engine.contents(destination), strict=True):
        rows = torch.stack([cache[slot // S, :, slot % S] for slot in source.tolist()])
        k, v = rows.split(D, dim=-1)
        assert key.tobytes() == k.contiguous().numpy().tobytes()
        assert value.tobytes() == v.contiguous().numpy().tobytes()


def test_slot_and_page_views_share_the_memory_of_the_cache() -> None:
    cache = make_caches()[1]
    rows, pages = slot_rows(cache), page_view(cache)
    assert rows.shape == (N * S, H * 2 * D)
    assert pages.shape == (N * S, H, 1, 2 * D)
    for slot in (0, 17, N * S - 1):
        assert torch.equal(rows[slot].view(H, 2 * D), cache[slot // S, :, slot % S])
        assert torch.equal(pages[slot, :, 0], cache[slot // S, :, slot % S])
    pages[17] = 0
    assert not cache[1, :, 1].any()


def hnd() -> torch.Tensor:
    return torch.zeros(N, H, S, 2 * D)  # LBHNC: a token's heads are S tokens apart


def interleaved() -> torch.Tensor:
    return torch.zeros(N, LAYERS, S, H, 2 * D)[:, 1].permute(0, 2, 1, 3)  # BLNHC


@pytest.mark.parametrize("make", [hnd, interleaved])
def test_other_layouts_are_refused_by_name(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedError, match="LBNHC"):
        slot_rows(make())
