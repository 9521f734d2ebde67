"""The learned cache layout names every element of K and V; copies and packing go through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vtoken.errors import UnsupportedError

pytestmark = pytest.mark.vllm

SHAPES = [("vec", 32, 64), ("vec", 64, 128), ("vec16", 16, 64)]


def written(isa: str, block_size: int, dim: int, dtype: str) -> tuple[Any, Any, Any]:
    """A cache of 4 blocks and 2 heads filled by vLLM's own store operation, and K, V [T, H, D]."""
    import torch
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    tokens = 4 * block_size
    kind = getattr(torch, dtype)
    key, value = (torch.randn(tokens, 2, dim).to(kind) for _ in range(2))
    cache = torch.zeros(4, 2, block_size, 2 * dim, dtype=kind)
    halves = cache.view(4, 2, 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key,
        value,
        *halves,
        torch.arange(tokens),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return cache, key, value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("isa", "block_size", "dim"), SHAPES)
def test_the_learned_views_read_what_vllm_wrote(
    isa: str, block_size: int, dim: int, dtype: str
) -> None:
    import torch

    from vtoken.vllm.layout import learn_layout

    cache, key, value = written(isa, block_size, dim, dtype)
    k, v = learn_layout(cache, isa).views(cache)
    assert torch.equal(k.flatten(0, 1), key)
    assert torch.equal(v.flatten(0, 1), value)


def test_a_layout_that_is_not_affine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm import layout

    honest = layout._write_and_read

    def tiled(cache: Any, isa: str, pattern: Any) -> tuple[list[int], list[int]]:
        """K with the second half of its elements in reverse, as no stride can describe."""
        k, v = honest(cache, isa, pattern)
        half = len(k) // 2
        return k[:half] + k[half:][::-1], v

    monkeypatch.setattr(layout, "_write_and_read", tiled)
    with pytest.raises(UnsupportedError, match="not affine"):
        layout.learn_layout(written("vec", 32, 64, "float32")[0], "vec")


def test_copies_read_all_sources_before_they_write() -> None:
    import torch

    from vtoken.vllm.copy_engine import CPUCopyEngine
    from vtoken.vllm.layout import learn_layout

    cache, key, value = written("vec", 32, 64, "float32")
    layout = learn_layout(cache, "vec")
    source = np.array([3, 70, 71], dtype=np.int64)
    destination = np.array([70, 71, 3], dtype=np.int64)  # a cycle
    _, wrong = CPUCopyEngine([cache], layout, 32).copy(source, destination, verify=True)
    assert wrong is None
    k, v = (view.flatten(0, 1) for view in layout.views(cache))
    assert torch.equal(k[destination], key[source])
    assert torch.equal(v[destination], value[source])


def test_the_content_check_notices_a_lost_token() -> None:
    from vtoken.vllm.copy_engine import CPUCopyEngine
    from vtoken.vllm.layout import learn_layout

    cache, _, _ = written("vec", 32, 64, "float32")
    copies = CPUCopyEngine([cache], learn_layout(cache, "vec"), 32)
    source, twice = np.array([3, 4]), np.array([70, 70])
    _, wrong = copies.copy(source, twice, verify=True)
    assert wrong is not None
    assert "layer 0" in wrong


@pytest.mark.parametrize("num_new", [1, 5])
def test_packing_keeps_every_live_token_once_and_the_new_ones_last(num_new: int) -> None:
    import torch

    from vtoken.vllm.holes import HoleyRequest, plan_packing
    from vtoken.vllm.layout import learn_layout

    cache, key, value = written("vec", 32, 64, "float32")
    rng = np.random.default_rng(1)
    live = np.sort(rng.choice(100, size=60, replace=False))
    live = np.concatenate([live, np.arange(32, 64)])  # block 1 is full: it is copied whole
    slots = np.concatenate([np.unique(live), np.arange(110, 110 + num_new)])
    packing = plan_packing([HoleyRequest(0, slots, num_new)], 32)
    scratch = torch.full((packing.num_blocks, 2, 32, 128), float("nan"))
    layout = learn_layout(cache, "vec")
    packing.fill(cache, scratch, layout)
    k, v = (view.flatten(0, 1) for view in layout.views(scratch))
    n = int(packing.seq_lens[0])
    assert n == len(slots)
    assert len(packing.full_from) == 1
    assert torch.equal(k[n - num_new : n], key[slots[-num_new:]])  # the new ones last, in order
    assert torch.equal(v[n - num_new : n], value[slots[-num_new:]])

    def rows(x: Any) -> set[tuple[float, ...]]:
        return {tuple(row) for row in x.flatten(1).tolist()}

    assert rows(k[:n]) == rows(key[slots])  # nothing lost, nothing doubled
    assert rows(v[:n]) == rows(value[slots])
