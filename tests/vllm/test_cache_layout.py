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

    from vtoken.vllm.cpu.layout import learn_layout

    cache, key, value = written(isa, block_size, dim, dtype)
    k, v = learn_layout(cache, isa).views(cache)
    assert torch.equal(k.flatten(0, 1), key)
    assert torch.equal(v.flatten(0, 1), value)


def test_a_layout_that_is_not_affine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vtoken.vllm.cpu import layout

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

    from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
    from vtoken.vllm.cpu.layout import learn_layout

    cache, key, value = written("vec", 32, 64, "float32")
    layout = learn_layout(cache, "vec")
    source = np.array([3, 70, 71], dtype=np.int64)
    destination = np.array([70, 71, 3], dtype=np.int64)  # a cycle
    CPUCopyEngine([cache], layout, 32).copy(source, destination)
    k, v = (view.flatten(0, 1) for view in layout.views(cache))
    assert torch.equal(k[destination], key[source])
    assert torch.equal(v[destination], value[source])


def holey_slots(num_new: int) -> np.ndarray:
    """60 random ones of the first 100 slots, block 1 wholly, and `num_new` new ones."""
    live = np.random.default_rng(1).choice(100, size=60, replace=False)
    return np.concatenate([np.union1d(live, np.arange(32, 64)), np.arange(105, 105 + num_new)])


def rows(x: Any) -> list[list[float]]:
    return sorted(x.flatten(1).tolist())


@pytest.mark.parametrize("num_new", [1, 5])
def test_packing_apart_keeps_every_live_token_once_and_a_chunk_last(num_new: int) -> None:
    import torch

    from vtoken.vllm.cpu.holes import HoleyRequest, plan_apart
    from vtoken.vllm.cpu.layout import learn_layout

    cache, key, value = written("vec", 32, 64, "float32")
    slots = holey_slots(num_new)
    apart = plan_apart([HoleyRequest(0, slots, num_new)], 32)
    assert apart.full_from.tolist() == [1]  # copied whole
    scratch = torch.full((apart.num_blocks, 2, 32, 128), float("nan"))
    layout = learn_layout(cache, "vec")
    apart.fill(cache, scratch, layout)
    k, v = (view.flatten(0, 1)[: len(slots)] for view in layout.views(scratch))
    assert apart.seq_lens.tolist() == [len(slots)]
    assert rows(k) == rows(key[slots])
    assert rows(v) == rows(value[slots])
    if num_new > 1:
        assert torch.equal(k[-num_new:], key[slots[-num_new:]])


def test_packing_into_lent_blocks_touches_no_other_block() -> None:
    import torch

    from vtoken.vllm.cpu.holes import LentRequest, plan_lent
    from vtoken.vllm.cpu.layout import learn_layout

    cache, key, value = written("vec", 32, 64, "float32")
    cache = torch.cat([cache, torch.zeros_like(cache)])  # blocks 4 to 7 are free
    before = cache[:4].clone()
    slots = holey_slots(1)
    loose = slots[slots // 32 != 1]
    lent = plan_lent([LentRequest(0, np.array([1]), loose, [6, 5])], 32)
    layout = learn_layout(cache, "vec")
    lent.fill(cache, layout)
    assert torch.equal(cache[:4], before)
    assert not cache[[4, 7]].any()
    original = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    table = lent.rewrite(original)
    assert table[0, :3].tolist() == [1, 6, 5]
    assert original.tolist() == [[0, 1, 2, 3]]
    read = (table[0, :3, None] * 32 + torch.arange(32)).flatten()[: len(slots)].long()
    k, v = (view.flatten(0, 1)[read] for view in layout.views(cache))
    assert rows(k) == rows(key[slots])
    assert rows(v) == rows(value[slots])


def test_too_few_lent_blocks_are_an_error() -> None:
    from vtoken.vllm.cpu.holes import LentRequest, plan_lent

    with pytest.raises(ValueError, match="do not fit 1 lent blocks"):
        plan_lent([LentRequest(0, np.array([1]), holey_slots(1), [6])], 32)
