"""The probe's kernels against the torch probe, over random caches of every type and shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.vllm

N = 24
DTYPES = ["float32", "bfloat16", "float16"]


def a_layout(block_size: int, dim: int, transposed: bool) -> Any:
    """K transposed inside a block, as in vLLM, or by rows."""
    from vtoken.vllm.cpu.layout import KVLayout, Placement

    rows = Placement(block_size * dim, dim, 1)
    return KVLayout(Placement(0, 1, block_size) if transposed else Placement(0, dim, 1), rows)


def requests(rng: Any, block_size: int, sizes: list[tuple[int, int]], signals: list[Any]) -> Any:
    """A request for each (live tokens, new ones), each with all signals; its slots are random."""
    import torch

    from vtoken.vllm.worker.probe import ProbedRequest

    found, first = [], 0
    for number, (live, new) in enumerate(sizes):
        slots = torch.from_numpy(rng.choice(N * block_size, size=live, replace=False))
        ids = np.sort(rng.choice(4 * live, size=live, replace=False))
        mirror: Any = None
        found += [
            ProbedRequest(str(number), first, new, mirror, signal, ids, slots) for signal in signals
        ]
        first += new
    return found


@st.composite
def aggregates(draw: st.DrawFn, num_heads: int) -> Any:
    """A signal of one or two of three layers, and of some heads or all."""
    from vtoken.policies.signals import Signal

    layers = draw(st.sampled_from([(0,), (2,), (0, 1), (1, 2)]))
    heads = tuple(sorted(draw(st.sets(st.integers(0, num_heads - 1), max_size=3))))
    if draw(st.booleans()):
        return Signal("attention_sum", layers=layers, heads=heads)
    over = (draw(st.sampled_from(["mean", "max"])) for _ in range(2))
    return Signal("attention_window", 3, *over, layers=layers, heads=heads)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_equal_those_of_the_torch_probe(data: st.DataObject) -> None:
    import torch

    from vtoken.vllm.cpu.compiled_probe import StepProbe
    from vtoken.vllm.worker.probe import probe

    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    block_size = data.draw(st.sampled_from([16, 32, 48]))
    dim = data.draw(st.sampled_from([32, 64, 80]))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (3, 3)]))
    sizes = data.draw(
        st.lists(
            st.tuples(st.integers(8, 200), st.sampled_from([1, 1, 1, 5])), min_size=1, max_size=4
        )
    )
    soft_cap = data.draw(st.sampled_from([0.0, 0.5, 30.0]))
    has_sinks = data.draw(st.booleans())
    dtype = getattr(torch, data.draw(st.sampled_from(DTYPES)))
    layout = a_layout(block_size, dim, data.draw(st.booleans()))
    signals = data.draw(st.lists(aggregates(kv_heads * group), min_size=1, max_size=3))
    torch.manual_seed(int(rng.integers(1000)))
    tokens = sum(new for _, new in sizes)
    query = torch.randn(tokens, kv_heads * group, dim).to(dtype)
    sinks = 4 * torch.randn(kv_heads * group) if has_sinks else None
    found = requests(rng, block_size, sizes, signals)
    expected = [replace(request) for request in found]
    step = StepProbe(found, N, block_size)
    for layer in range(3):
        cache = (3 * torch.randn(N, kv_heads, block_size, 2 * dim)).to(dtype)
        cache[:, :, 0, 0] = 3e-6  # subnormal in float16
        softmax: Any = {"scale": 0.3, "soft_cap": soft_cap, "sinks": sinks}
        step.add(layer, query, cache, layout, **softmax)
        probe(expected, layer, query, layout.views(cache)[0], **softmax)
    for request, other in zip(found, expected, strict=True):
        assert request.rows is not None
        assert other.rows is not None
        torch.testing.assert_close(request.rows, other.rows, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_row_does_not_depend_on_where_tokens_are(block_size: int, dtype: str) -> None:
    """Bit for bit: relocation does not change the scores that a policy reads."""
    import torch

    from vtoken.policies.signals import Signal
    from vtoken.vllm.cpu.compiled_probe import StepProbe
    from vtoken.vllm.worker.probe import ProbedRequest

    rng = np.random.default_rng(0)
    layout = a_layout(block_size, 64, transposed=True)
    key = torch.randn(100, 2, 64)
    query = torch.randn(1, 6, 64).to(getattr(torch, dtype))
    rows = []
    for _ in range(5):
        cache = torch.randn(N, 2, block_size, 128).to(getattr(torch, dtype))
        slots = rng.choice(N * block_size, size=100, replace=False)
        layout.views(cache)[0][slots // block_size, slots % block_size] = key.to(cache.dtype)
        mirror: Any = None
        request = ProbedRequest(
            "a",
            0,
            1,
            mirror,
            Signal("attention_last", layers=(0,)),
            np.arange(100),
            torch.from_numpy(slots),
        )
        StepProbe([request], N, block_size).add(0, query, cache, layout, scale=0.125, soft_cap=0.0)
        rows.append(request.rows)
    for row in rows:
        assert row is not None
        assert torch.equal(row, rows[0])


def test_a_slot_outside_the_cache_is_an_error() -> None:
    import torch

    from vtoken.policies.signals import Signal
    from vtoken.vllm.cpu.compiled_probe import StepProbe
    from vtoken.vllm.worker.probe import ProbedRequest

    mirror: Any = None
    for slot in (-1, N * 16):
        slots = torch.tensor([3, slot])
        request = ProbedRequest(
            "a", 0, 1, mirror, Signal("attention_last", layers=(0,)), np.arange(2), slots
        )
        with pytest.raises(IndexError, match=f"slot {slot} is not in a cache"):
            StepProbe([request], N, 16)


def test_exp_is_exact_to_float32_and_small_for_the_least() -> None:
    from vtoken.vllm.cpu.compiled_probe import exp

    x = np.concatenate([np.linspace(-86, 0, 20001), [-1000.0, -np.inf]]).astype(np.float32)
    found = x + np.float32(5)
    exp(found, np.float32(5))
    shifted = (x + np.float32(5)) - np.float32(5)
    expected = np.exp(shifted[:-2].astype(np.float64))
    np.testing.assert_allclose(found[:-2], expected, rtol=2.5e-7)
    assert (found[-2:] < 2e-38).all()
