"""Page tables at page size 1: their contents, and attention through them against an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.core.request_step import RequestStep, steps_of
from vtoken.core.protocol.mirror import BlockTables, Mirrors
from vtoken.vllm.cuda.layout import page_view
from vtoken.vllm.cuda.pages import PageTables

S, BLOCKS = 4, 64


class Walk:
    """A few requests whose tokens die, move and grow at random; the mirrors are the oracle."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pages = PageTables(S, torch.device("cpu"))
        self.free = list(self.rng.permutation(BLOCKS * S))
        self.mirrors = Mirrors.of({name: np.array(self.take(8)) for name in "abc"})

    def take(self, number: int) -> list[int]:
        return [self.free.pop(0) for _ in range(number)]

    def step(self) -> list[str]:
        """One step of all requests; return those that are scheduled."""
        parts, scheduled = {}, []
        for name, mirror in self.mirrors.items():
            part = parts[name] = RequestStep(mirror.num_tokens, dense=False)
            ids, slots = mirror.live()
            kind = self.rng.integers(3)
            if kind == 0 and len(ids) > 3:
                part.evicted = self.rng.choice(ids, 2, replace=False)
            elif kind == 1:
                part.moved_ids = self.rng.choice(ids, 2, replace=False)
                part.moved_slots = np.array(self.take(2))
                self.free += slots[np.isin(ids, part.moved_ids)].tolist()
            if self.rng.integers(4):
                part.new_slots = np.array(self.take(1))
                scheduled.append(name)
            part.num_live = len(ids) - len(part.evicted) + len(part.new_slots)
        self.mirrors.apply(steps_of(parts))
        return scheduled

    def grow(self, name: str) -> None:
        """One more token of one request."""
        mirror = self.mirrors[name]
        part = RequestStep(mirror.num_tokens, new_slots=np.array(self.take(1)))
        part.num_live = len(mirror.live()[0]) + 1
        self.mirrors.apply(steps_of({name: part}))

    def resident(self, row: int, length: int) -> list[int]:
        table: list[int] = self.pages._table[row, :length].tolist()
        return table


def run(walk: Walk, steps: int, *, versions: bool = True) -> list[str]:
    """Requests whose row differed from the mirror after a step; some steps release rows first."""
    wrong = []
    for _ in range(steps):
        before = walk.mirrors.columns.version.copy()
        names = walk.step()
        if not versions:
            walk.mirrors.columns.version[:] = before
        if walk.rng.integers(2):
            walk.pages.release(walk.mirrors)
        rows = walk.pages.update(walk.mirrors, walk.mirrors.rows_of(names)).tolist()
        assert len({*rows}) == len(rows)
        for name, row in zip(names, rows, strict=True):
            slots = walk.mirrors[name].live()[1].tolist()
            if walk.resident(row, len(slots)) != slots:
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("seed", range(8))
def test_a_resident_row_is_the_mirror_in_logical_order_after_every_step(seed: int) -> None:
    assert run(Walk(seed), 60) == []


def test_control_without_versions_a_row_is_stale_when_tokens_move_and_that_is_noticed() -> None:
    assert run(Walk(0), 60, versions=False) != []


def test_growing_sends_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(0)
    sent: list[int] = []

    def counted(array: Any, device: torch.device) -> torch.Tensor:
        sent.append(array.size)
        return torch.from_numpy(array.copy())

    monkeypatch.setattr("vtoken.vllm.cuda.pages.upload", counted)
    for _ in range(3):
        walk.grow("a")
        walk.pages.update(walk.mirrors, walk.mirrors.rows_of(["a"]))
    assert sent[1:] == [3, 3]  # row, column and slot of one token


def test_rows_are_reused_and_the_table_does_not_grow_with_the_number_of_requests() -> None:
    pages, mirrors = PageTables(S, torch.device("cpu")), Mirrors()
    for number in range(50):
        name = str(number)
        mirrors.place([name], np.array([9]), S, BlockTables.of([[number, 3, 1]]))
        row = pages.update(mirrors, mirrors.rows_of([name]))
        assert pages.slots(int(row[0]), 9).tolist() == mirrors[name].live()[1].tolist()
        mirrors.drop([name])
        if number % 3:
            pages.release(mirrors)
    assert pages._table.shape[0] == 1


def test_a_row_whose_request_ended_is_released() -> None:
    walk = Walk(0)
    walk.pages.update(walk.mirrors, walk.mirrors.rows_of(["a", "b"]))
    walk.mirrors.drop(["a"])
    walk.pages.release(walk.mirrors)
    assert int((walk.pages._uploads.resident >= 0).sum()) == 1


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


def resident(pages: PageTables, slots: list[int]) -> np.ndarray:
    """The resident row [1] of a request whose live tokens are in `slots`."""
    return pages.update(Mirrors.of({"a": np.array(slots)}), np.array([0]))


def test_page_size_one_reads_rows_with_and_without_holes_in_one_table(cache: torch.Tensor) -> None:
    """Rows 0 and 2 are dense; row 1 has holes, whose dead slots must not be read."""
    block_table = torch.tensor([[5, 9, 2, 0], [7, 3, 0, 0], [1, 0, 0, 0]], dtype=torch.int32)
    live = [7 * S, 7 * S + 3, 3 * S + 1]
    lengths = [10, len(live), 3]
    query = torch.randn(3, 4, 8)
    pages = PageTables(S, torch.device("cpu"))
    table = pages.batch(block_table, np.array([1]), resident(pages, live), max(lengths))
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
    assert not torch.allclose(got[1], dense[1])  # reading dead slots too is detected


def test_attention_does_not_depend_on_relocation(
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
        row, blocks = resident(pages, place), torch.zeros(1, 16, dtype=torch.int32)
        table = pages.batch(blocks, np.array([0]), row, 30)
        results.append(attention(query, page_view(memory), table, [30], 1))
    assert torch.equal(*results)


def test_a_length_beyond_the_block_table_is_refused() -> None:
    pages = PageTables(S, torch.device("cpu"))
    row, blocks = resident(pages, [1, 2]), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="9 tokens do not fit 8 slots"):
        pages.batch(blocks, np.array([0]), row, 9)
