"""Page tables at page size 1: what they say, and attention through them against a plain oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vtoken.protocol.mirror import Mirror
from vtoken.protocol.step import RequestStep
from vtoken.vllm.cuda.layout import page_view
from vtoken.vllm.cuda.pages import LiveRow, PageTables
from vtoken.vllm.worker.executor import BatchRow, HoleyRow

S, BLOCKS = 4, 64


class Walk:
    """A few requests whose tokens die, move and grow at random; the mirror is the truth."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pages = PageTables(S, torch.device("cpu"))
        self.free = list(self.rng.permutation(BLOCKS * S))
        self.mirrors: dict[str, Mirror] = {}
        for name in "abc":
            slots = np.array([self.free.pop() for _ in range(8)], dtype=np.int64)
            self.mirrors[name] = Mirror(slots)

    def step(self, name: str, *, scheduled: bool = True, forget: bool = True) -> HoleyRow | None:
        """One step of one request, as the plan and the executor would have it."""
        mirror = self.mirrors[name]
        part = RequestStep(mirror.num_tokens)
        ids, slots = mirror.live()
        kind = self.rng.integers(3)
        if kind == 0 and len(ids) > 3:
            part.evicted = self.rng.choice(ids, 2, replace=False)
        elif kind == 1:
            part.moved_ids = self.rng.choice(ids, 2, replace=False)
            part.moved_slots = np.array([self.free.pop(0) for _ in range(2)], dtype=np.int64)
            self.free += slots[np.isin(ids, part.moved_ids)].tolist()
        if scheduled:
            part.new_slots = np.array([self.free.pop(0)], dtype=np.int64)
        part.num_live = len(ids) - len(part.evicted) + len(part.new_slots)
        part.dense = False
        mirror.apply(part)
        if forget and (len(part.evicted) or len(part.moved_ids)):
            self.pages.forget(name)
        if not scheduled:
            return None
        return HoleyRow(BatchRow(name, 0, 0, 1, part.num_tokens), part, mirror)

    def resident(self, row: int, length: int) -> list[int]:
        table: list[int] = self.pages._table[row, :length].tolist()
        return table


def run(walk: Walk, steps: int, *, forget: bool = True) -> list[str]:
    """Requests whose row was not the mirror's after some step."""
    wrong = []
    for _ in range(steps):
        holey = []
        for name in "abc":
            moved = walk.step(name, scheduled=bool(walk.rng.integers(4)), forget=forget)
            if moved is not None:
                holey.append(moved)
        for h, row in zip(holey, walk.pages.update([LiveRow.of(h) for h in holey]), strict=True):
            slots = h.mirror.live()[1].tolist()
            if walk.resident(row, len(slots)) != slots:
                wrong.append(h.row.request_id)
    return wrong


@pytest.mark.parametrize("seed", range(8))
def test_a_resident_row_is_the_mirror_in_logical_order_after_every_step(seed: int) -> None:
    assert run(Walk(seed), 60) == []


def test_a_row_that_is_not_forgotten_when_tokens_move_is_stale_and_noticed() -> None:
    assert run(Walk(0), 60, forget=False) != []


def test_growing_sends_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0)
    sent: list[int] = []

    def counted(array: Any, device: torch.device) -> torch.Tensor:
        sent.append(array.size)
        return torch.from_numpy(array.copy())

    monkeypatch.setattr("vtoken.vllm.cuda.pages.upload", counted)
    mirror = walk.mirrors["a"]
    for _ in range(3):
        part = RequestStep(mirror.num_tokens, new_slots=np.array([walk.free.pop()]), dense=False)
        part.num_live = len(mirror.live()[0]) + 1
        mirror.apply(part)
        walk.pages.update([LiveRow("a", mirror, part.num_live)])
    assert sent[1:] == [3, 3]  # row, column and slot of one token


def test_rows_are_reused_and_the_table_does_not_grow_with_the_number_of_requests() -> None:
    pages = PageTables(S, torch.device("cpu"))
    for number in range(50):
        mirror = Mirror(np.arange(9, dtype=np.int64))
        pages.update([LiveRow(str(number), mirror, 9)])
        pages.forget(str(number))
    assert pages._table.shape[0] == 1


def attention(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seq_lens: list[int], size: int
) -> torch.Tensor:
    """Paged attention in plain torch, one query a request, page size `size`: [R, Hq, D]."""
    keys, values = cache.transpose(1, 2).split(query.shape[2], dim=-1)
    groups = query.shape[1] // keys.shape[2]
    out = []
    for q, pages, length in zip(query, table, seq_lens, strict=True):
        at = torch.arange(length)
        page = pages[at // size].long()
        k = keys[page, at % size].repeat_interleave(groups, dim=1)
        v = values[page, at % size].repeat_interleave(groups, dim=1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q, k), dim=-1)
        out.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(out)


@pytest.fixture
def cache() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(BLOCKS, S, 2, 16).permute(0, 2, 1, 3)


def holey(name: str, row: int, slots: list[int]) -> HoleyRow:
    part = RequestStep(len(slots), num_live=len(slots), dense=False)
    mirror = Mirror(np.array(slots, dtype=np.int64))
    return HoleyRow(BatchRow(name, row, row, 1, len(slots) - 1), part, mirror)


def test_page_size_one_reads_dense_rows_and_holey_rows_in_one_table(cache: torch.Tensor) -> None:
    """Rows 0 and 2 are dense; row 1 has holes, whose dead slots nobody may see."""
    block_table = torch.tensor([[5, 9, 2, 0], [7, 3, 0, 0], [1, 0, 0, 0]], dtype=torch.int32)
    live = [7 * S, 7 * S + 3, 3 * S + 1]
    lengths = [10, len(live), 3]
    query = torch.randn(3, 4, 8)
    pages = PageTables(S, torch.device("cpu"))
    resident = pages.update([LiveRow.of(holey("b", 1, live))])
    table = pages.batch(block_table, [1], resident, max(lengths))
    assert table.shape == (3, 10)
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    got = attention(query, page_view(cache), table, lengths, 1)
    dense = attention(query, cache, block_table, [10, 8, 3], S)
    assert torch.equal(got[0], dense[0])
    assert torch.equal(got[2], dense[2])
    rows = cache.transpose(1, 2).reshape(BLOCKS * S, 2, 16)[live]
    k, v = rows.repeat_interleave(2, dim=1).split(8, dim=-1)
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query[1], k), dim=-1)
    torch.testing.assert_close(got[1], torch.einsum("hn,nhd->hd", weights, v))
    assert not torch.allclose(got[1], dense[1])  # reading the dead ones too would show


def test_attention_does_not_depend_on_where_relocation_has_put_the_tokens(
    cache: torch.Tensor,
) -> None:
    query = torch.randn(1, 4, 8)
    slots = torch.randperm(BLOCKS * S)[:30].tolist()
    there = [slot for slot in range(BLOCKS * S) if slot not in slots][::-1][:30]
    moved = cache.clone(memory_format=torch.preserve_format)
    page_view(moved)[there] = page_view(cache)[slots]
    results = []
    for memory, place in ((cache, slots), (moved, there)):
        pages = PageTables(S, torch.device("cpu"))
        resident = pages.update([LiveRow.of(holey("a", 0, place))])
        table = pages.batch(torch.zeros(1, 16, dtype=torch.int32), [0], resident, 30)
        results.append(attention(query, page_view(memory), table, [30], 1))
    assert torch.equal(*results)


def test_a_length_beyond_the_block_table_is_refused() -> None:
    pages = PageTables(S, torch.device("cpu"))
    resident = pages.update([LiveRow.of(holey("a", 0, [1, 2]))])
    with pytest.raises(ValueError, match="9 tokens do not fit 8 places"):
        pages.batch(torch.zeros(1, 2, dtype=torch.int32), [0], resident, 9)
