"""The learned cache layout addresses every element of K and V; copies and packing use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vtoken.base.errors import UnsupportedError

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
        """K with the second half of its elements in reverse, which is not affine."""
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
    CPUCopyEngine([cache], layout).copy(source, destination)
    k, v = (view.flatten(0, 1) for view in layout.views(cache))
    assert torch.equal(k[destination], key[source])
    assert torch.equal(v[destination], value[source])


def test_the_copy_engine_refuses_a_slot_outside_the_cache() -> None:
    from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
    from vtoken.vllm.cpu.layout import learn_layout

    cache, *_ = written("vec", 32, 64, "float32")
    copies = CPUCopyEngine([cache], learn_layout(cache, "vec"))
    for slot in (-1, 128):
        with pytest.raises(IndexError, match="there are 128"):
            copies.copy(np.array([slot]), np.array([0]))
        with pytest.raises(IndexError, match="there are 128"):
            next(copies.contents(np.array([slot])))
