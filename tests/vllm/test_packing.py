"""Packing of holes: through the new block tables, attention reads every live token once.

Every slot of a cache holds a different number, so a lost, doubled or stale token is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.vllm

N, H, S, D, LAYERS = 14, 2, 16, 8, 2
DTYPES = ["float32", "bfloat16"]


def layout(transposed: bool = True) -> Any:
    """K transposed inside a block, as in vLLM, or by rows."""
    from vtoken.vllm.cpu.layout import KVLayout, Placement

    rows = Placement(S * D, D, 1)
    return KVLayout(Placement(0, 1, S) if transposed else Placement(0, D, 1), rows)


def split_partial(slots: Any) -> tuple[Any, Any]:
    """A request's full blocks, and its live `slots` in partial blocks."""
    blocks, counts = np.unique(slots // S, return_counts=True)
    full = blocks[counts == S]
    return full, slots[~np.isin(slots // S, full)]


class Pool:
    """Caches of two layers; `stamp` [N * S] numbers the last write to every slot."""

    def __init__(self, dtype: str) -> None:
        import torch

        self.layout = layout()
        self.caches = [
            torch.full((N, H, S, 2 * D), -1.0, dtype=getattr(torch, dtype)) for _ in range(LAYERS)
        ]
        self.stamp = np.full(N * S, -1)
        self._next = 0

    def write(self, slots: Any) -> None:
        import torch

        for slot in slots:
            self.stamp[slot] = self._next % 251  # exact in every type
            self._next += 1
            for layer, cache in enumerate(self.caches):
                key, value = self.layout.views(cache)
                ramp = torch.arange(H * D).view(H, D) % 2
                key[slot // S, slot % S] = (self.stamp[slot] + ramp).to(cache.dtype)
                value[slot // S, slot % S] = (-self.stamp[slot] - ramp - layer).to(cache.dtype)

    def read(self, cache: Any, layer: int, slots: Any) -> Iterator[int]:
        """The stamps in `slots` of `cache`; checks every element."""
        import torch

        key, value = self.layout.views(cache)
        ramp = (torch.arange(H * D).view(H, D) % 2).float()
        for slot in slots:
            k, v = (x[slot // S, slot % S].float() for x in (key, value))
            assert torch.equal(k, k[0, 0] + ramp)
            assert torch.equal(v, -k - layer)
            yield int(k[0, 0])


def check_links(packed: Any, pool: Pool) -> None:
    """The invariants of `PackedSlots`."""
    sources = np.flatnonzero(packed.packed_at >= 0)
    copies = np.flatnonzero(packed.source_of >= 0)
    assert (packed.source_of[packed.packed_at[sources]] == sources).all()
    assert (packed.packed_at[packed.source_of[copies]] == copies).all()
    for layer, cache in enumerate(pool.caches):
        held = list(pool.read(cache, layer, copies))
        assert held == list(pool.stamp[packed.source_of[copies]])


@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES))
@settings(max_examples=25, deadline=None)
def test_borrowed_blocks_hold_the_live_tokens_of_every_step(seed: int, dtype: str) -> None:
    """Two requests, seven blocks to borrow, evictions, writes, relocations."""
    from vtoken.base.arrays import Ragged
    from vtoken.vllm.cpu.holes import BorrowingRequests, PackedSlots

    rng = np.random.default_rng(seed)
    pool = Pool(dtype)
    packed = PackedSlots(N, S, LAYERS)
    blocks = [np.array([1, 2, 3]), np.array([4, 3, 5, 6])]  # block 3 is shared
    live = [np.sort(rng.choice(len(b) * S, 30, replace=False)) for b in blocks]
    free = np.array([7, 8, 9, 10, 11, 12, 13])
    pool.write(range(7 * S))
    for _ in range(12):
        event = rng.choice(["append", "evict", "relocate", "other blocks", "unknown", "nothing"])
        r = int(rng.integers(2))
        dead = np.setdiff1d(np.arange(len(blocks[r]) * S), live[r])
        dead = dead[blocks[r][dead // S] != 3]  # shared blocks are not written
        new = rng.choice(dead, 1)
        slots = blocks[r][new // S] * S + new % S
        if event in ("append", "relocate") and len(live[r]) < 50:
            pool.write(slots)
            packed.written(np.append(slots, -1))
            kept = live[r][1:] if event == "relocate" else live[r]
            live[r] = np.sort(np.append(kept, new))
        elif event == "evict" and len(live[r]) > 20:
            live[r] = np.delete(live[r], rng.integers(len(live[r]), size=2))
        elif event == "other blocks":
            free = np.roll(free, 1)
        elif event == "unknown":
            pool.write(free[:2] * S)
            pool.write(slots)
            packed.invalidate()
        split = [split_partial(b[x // S] * S + x % S) for b, x in zip(blocks, live, strict=True)]
        partial = [part[1] for part in split]
        first = -(-len(partial[0]) // S)
        borrowed = [free[:first], free[first : first - (-len(partial[1]) // S)]]
        requests = BorrowingRequests(
            np.array([2, 0]),
            Ragged.joined([full for full, _ in split]),
            Ragged.joined(partial),
            Ragged.joined(borrowed),
        )
        table = np.full((3, 8), 99, dtype=np.int32)
        held = [cache.clone() for cache in pool.caches]
        copies = packed.plan(requests, table)
        for cache in pool.caches:
            copies.copy(cache, cache, pool.layout)
            packed.copied()
        pool.stamp[copies.target] = pool.stamp[copies.source]
        assert (table[1] == 99).all()
        for row, r in ((2, 0), (0, 1)):
            n = len(live[r])
            at = table[row, : -(-n // S)]
            assert (table[row, len(at) :] == 99).all()
            read = (at[:, None] * S + np.arange(S)).ravel()[:n]
            expected = pool.stamp[blocks[r][live[r] // S] * S + live[r] % S]
            for layer, cache in enumerate(pool.caches):
                assert sorted(pool.read(cache, layer, read)) == sorted(expected)
        other = np.setdiff1d(np.arange(N), np.concatenate(borrowed))
        for cache, before in zip(pool.caches, held, strict=True):
            assert (cache[other] == before[other]).all()
        check_links(packed, pool)


def borrowing_request(slots: Any, blocks: Any) -> Any:
    from vtoken.base.arrays import Ragged
    from vtoken.vllm.cpu.holes import BorrowingRequests

    full = Ragged.joined([np.array([1])])
    return BorrowingRequests(np.array([0]), full, Ragged.joined([slots]), Ragged.joined([blocks]))


def test_tokens_that_are_already_packed_are_not_copied_again() -> None:
    from vtoken.vllm.cpu.holes import PackedSlots

    packed = PackedSlots(N, S, 1)
    slots = np.array([40, 3, 41, 99])
    table = np.zeros((1, 4), dtype=np.int32)

    def copies(slots: Any, blocks: Any, copied: bool = True) -> list[int]:
        found = packed.plan(borrowing_request(slots, blocks), table).source.tolist()
        if copied:
            packed.copied()
        return found

    assert copies(slots, [7]) == [40, 3, 41, 99]
    assert copies(slots[::-1], [7]) == []
    assert copies(np.append(slots, 50), [7]) == [50]
    assert copies(np.array([3, 41, 99, 51]), [7]) == [51]  # 40 and 50 died: one hole, one token
    packed.written(np.array([41, -1]))
    assert copies(np.array([3, 41, 99, 51]), [7]) == [41]
    packed.written(np.array([7 * S + 1]))  # another request had that block
    assert copies(np.array([3, 41, 99, 51]), [7]) == [3]
    assert copies(np.array([3, 41, 99, 51]), [8]) == [3, 41, 99, 51]
    packed.invalidate()
    assert copies(np.array([3, 41]), [8], copied=False) == [3, 41]
    assert copies(np.array([3, 41]), [8]) == [3, 41]  # planned, but no layer was copied


def test_too_few_or_unknown_borrowed_blocks_are_an_error() -> None:
    from vtoken.vllm.cpu.holes import PackedSlots

    packed = PackedSlots(N, S, 1)
    table = np.zeros((1, 4), dtype=np.int32)
    with pytest.raises(ValueError, match="17 tokens of partial blocks do not fit 1 borrowed"):
        packed.plan(borrowing_request(np.arange(17), [7]), table)
    for slots, blocks in (([N * S], [7]), ([-1], [7]), ([3], [N]), ([3], [-1])):
        with pytest.raises(IndexError, match=f"outside the cache of {N}"):
            packed.plan(borrowing_request(np.array(slots), blocks), table)
    assert len(packed.plan(borrowing_request(np.arange(16), [7]), table).source) == 16


@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_the_side_buffer_has_every_live_token_once_and_a_chunk_last(seed: int, dtype: str) -> None:
    import torch

    from vtoken.base.arrays import Ragged
    from vtoken.vllm.cpu.holes import BufferedRequests, plan_side_buffer

    rng = np.random.default_rng(seed)
    pool = Pool(dtype)
    pool.write(range(N * S))
    num_new = rng.choice([1, 2, 7, 20], size=3)
    slots = []
    for k in num_new:
        blocks = rng.choice(N, size=5, replace=False)
        old = rng.choice(4 * S, size=rng.integers(1, 4 * S), replace=False)
        at = np.append(np.union1d(old, np.arange(S)), 4 * S + np.arange(k) % S)
        at = at if k < S else np.append(old, np.setdiff1d(np.arange(4 * S), old)[:k])
        slots.append(blocks[at // S] * S + at % S)
        num_new[len(slots) - 1] = min(k, len(at) - 1) or 1
    plan = plan_side_buffer(BufferedRequests(np.arange(3), Ragged.joined(slots), num_new), N, S)
    buffers = [torch.full((plan.num_blocks, H, S, 2 * D), -1.0, dtype=c.dtype) for c in pool.caches]
    assert plan.seq_lens.tolist() == [len(x) for x in slots]
    num_full = 0
    for r, (live, k) in enumerate(zip(slots, num_new, strict=True)):
        old = live if k == 1 else live[:-k]
        num_full += len(split_partial(old)[0])
        read = (plan.block_table[r].numpy()[:, None] * S + np.arange(S)).ravel()[: len(live)]
        for layer, (cache, packed) in enumerate(zip(pool.caches, buffers, strict=True)):
            if r == 0:
                plan.copies.copy(cache, packed, pool.layout)
            found = list(pool.read(packed, layer, read))
            assert sorted(found) == sorted(pool.stamp[live])
            if k > 1:
                assert found[-k:] == list(pool.stamp[live[-k:]])
    assert len(plan.copies.full_from) == num_full  # copied as blocks


def test_the_side_buffer_refuses_a_slot_outside_the_cache() -> None:
    from vtoken.base.arrays import Ragged
    from vtoken.vllm.cpu.holes import BufferedRequests, plan_side_buffer

    for slot in (-1, N * S):
        slots = Ragged.joined([np.array([3, slot])])
        requests = BufferedRequests(np.array([0]), slots, np.array([1]))
        with pytest.raises(IndexError, match=f"slot {slot} is not in a cache"):
            plan_side_buffer(requests, N, S)
