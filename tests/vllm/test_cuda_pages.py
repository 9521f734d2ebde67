"""The inputs of attention at page size 1: page tables, lengths and slots against the mirrors, and
attention through them against an oracle.

The kernel is the one in plain Python (`tests.support.filled`); `test_cuda_shuffled.py` compares it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support import filled
from tests.support.core.request_step import RequestStep, steps_of
from tests.support.mirrors import mirrors_of
from vtoken.core.protocol.mirror import BlockTables, Mirrors
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.inputs import Positional, StepInputs
from vtoken.vllm.cuda.layout import page_view
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.worker.executor import Batch, PhysicalStep

S, BLOCKS, ROWS = 4, 64, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtoken.vllm.cuda.kernels.fill_tables", filled.fill_tables)


class Inputs:
    """The inputs of one worker; `present` makes those of a step, and checks nothing."""

    def __init__(self) -> None:
        self.tables = PageTables(ROWS, 100, CPU)
        self.staging = Staging(CPU)
        self.made = StepInputs(self.tables, S, self.staging)

    def present(
        self,
        mirrors: Mirrors,
        batch: dict[str, int],
        blocks: dict[str, list[int]] | None = None,
        lengths: dict[str, int] | None = None,
    ) -> torch.Tensor:
        """Present requests with `batch[name]` new tokens, in this order; return the slot mapping.

        Those in `mirrors` are planned. The others have `lengths[name]` tokens in `blocks[name]`.
        """
        names = [*batch]
        starts = np.cumsum([0, *batch.values()])
        rows = np.array([i for i, name in enumerate(names) if name in mirrors], dtype=np.int64)
        planned = [names[row] for row in rows]
        of_mirrors = mirrors.rows_of(planned)
        step = PhysicalStep(mirrors, rows, of_mirrors, mirrors.columns.num_live[of_mirrors])
        slots = [mirrors[name].live()[1][-batch[name] :] for name in planned]
        step.writes = np.stack([np.zeros(sum(map(len, slots)), np.int64), np.concatenate(slots)])
        table = torch.full((len(names), 25), BLOCKS - 1, dtype=torch.int32)
        counts = np.array([(lengths or {}).get(name, 99) for name in names], dtype=np.int32)
        for row, name in enumerate(names):
            own = (blocks or {}).get(name, [])
            table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        mapping = torch.full((int(starts[-1]),), -1, dtype=torch.int64)
        given = Positional(table, torch.from_numpy(counts), mapping, counts.copy())
        computed = np.zeros(len(names), dtype=np.int64)
        made = Batch.of(names, starts, computed, lambda _: BlockTables.of([]))
        self.made.put(step, made, given.max_lens)
        self.staging.send()
        self.made.fill(given)
        self.max_lens = given.max_lens.tolist()
        return mapping


class Walk:
    """A few requests whose tokens die, move and grow at random; the mirrors are the oracle."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.inputs = Inputs()
        self.free = list(self.rng.permutation(BLOCKS * S))
        self.mirrors = mirrors_of({name: np.array(self.take(8)) for name in "abc"})

    def take(self, number: int) -> list[int]:
        return [self.free.pop(0) for _ in range(number)]

    def step(self) -> dict[str, int]:
        """One step of all requests; return those that are scheduled, with their new tokens."""
        parts, scheduled = {}, {}
        for name, mirror in self.mirrors.items():
            part = parts[name] = RequestStep(mirror.num_tokens, dense=False)
            ids, slots = mirror.live()
            kind = self.rng.integers(3)
            if kind == 0 and len(ids) > 3:
                part.evicted = self.rng.choice(ids, min(2, len(ids) - 1), replace=False)
                self.free += slots[np.isin(ids, part.evicted)].tolist()
            elif kind == 1:
                part.moved_ids = self.rng.choice(ids, 2, replace=False)
                part.moved_slots = np.array(self.take(2))
                self.free += slots[np.isin(ids, part.moved_ids)].tolist()
            if self.rng.integers(4):
                scheduled[name] = int(self.rng.integers(1, 4))
                part.new_slots = np.array(self.take(scheduled[name]))
            part.num_live = len(ids) - len(part.evicted) + len(part.new_slots)
        self.mirrors.apply(steps_of(parts))
        order = self.rng.permutation([*scheduled])  # vLLM sorts the batch anew
        return {str(name): scheduled[name] for name in order}

    def wrong(self, batch: dict[str, int], mapping: torch.Tensor) -> list[str]:
        """The requests of `batch` whose inputs differ from the mirror."""
        found, tables = [], self.inputs.tables
        for row, (name, new) in enumerate(
            zip(batch, mapping.split([*batch.values()]), strict=True)
        ):
            slots = self.mirrors[name].live()[1].tolist()
            same = tables.slots(row, len(slots)).tolist() == slots
            same &= int(tables.seq_lens[row]) == self.inputs.max_lens[row] == len(slots)
            if not same or new.tolist() != slots[-len(new) :]:
                found.append(name)
        return found


def run(walk: Walk, steps: int, *, versions: bool = True) -> list[str]:
    """Requests whose inputs differed from the mirror after a step."""
    wrong = []
    for _ in range(steps):
        before = walk.mirrors.columns.version.copy()
        batch = walk.step()
        if not versions:
            walk.mirrors.columns.version[:] = before
        if batch:
            wrong += walk.wrong(batch, walk.inputs.present(walk.mirrors, batch))
    return wrong


@pytest.mark.parametrize("seed", range(8))
def test_a_row_of_the_batch_is_the_mirror_in_logical_order_after_every_step(seed: int) -> None:
    assert run(Walk(seed), 40) == []


def test_control_without_versions_a_row_is_stale_when_tokens_move_and_that_is_noticed() -> None:
    assert run(Walk(0), 40, versions=False) != []


def test_control_a_row_that_another_request_had_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the mirrors is reused; only its version tells the two requests apart."""
    found = []
    for versions in (True, False):
        inputs, mirrors = Inputs(), Mirrors()
        for number in range(3):
            mirrors.place(["a"], np.array([9]), S, BlockTables.of([[number, 3, 1]]))
            if not versions:
                mirrors.columns.version[:] = 0
            inputs.present(mirrors, {"a": 1})
            found.append(inputs.tables.slots(0, 9).tolist() == mirrors["a"].live()[1].tolist())
            mirrors.drop(["a"])
    assert found == [True, True, True, True, False, False]


def sizes_sent(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each upload has; grows."""
    sent: list[int] = []

    def counted(array: Any, _: torch.device) -> torch.Tensor:
        sent.append(array.size)
        return torch.from_numpy(array.copy())

    monkeypatch.setattr("vtoken.vllm.cuda.copies.staging.upload", counted)
    return sent


def test_a_step_makes_one_upload_and_growing_sends_new_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk = Walk(0)
    sent = sizes_sent(walk.inputs, monkeypatch)
    walk.inputs.present(walk.mirrors, {"a": 1, "b": 1})
    for name in "ab":
        mirror = walk.mirrors[name]
        part = RequestStep(mirror.num_tokens, new_slots=np.array(walk.take(1)))
        part.num_live = len(mirror.live()[0]) + 1
        walk.mirrors.apply(steps_of({name: part}))
    batch = {"b": 1, "a": 1}
    mapping = walk.inputs.present(walk.mirrors, batch)
    header = 12  # six facts of each row
    assert sent == [header + 2 + 2 * 8 + 2, header + 2 + 2]  # rounded up to 16 bytes
    assert walk.wrong(batch, mapping) == []


def test_a_step_without_planned_rows_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs()
    sent = sizes_sent(inputs, monkeypatch)
    batch = Batch.of(["a"], [0, 1], [4], lambda _: BlockTables.of([]))
    lengths = np.array([5, 0], dtype=np.int32)  # a row of padding
    blocks = torch.tensor([[7, 2], [9, 9]], dtype=torch.int32)
    inputs.made.put(None, batch, lengths)
    inputs.staging.send()
    inputs.made.fill(Positional(blocks, torch.from_numpy(lengths), torch.zeros(2).long(), lengths))
    assert sent == []
    assert inputs.tables.slots(0, 5).tolist() == [28, 29, 30, 31, 8]
    assert inputs.tables.seq_lens[:2].tolist() == [5, 0]


def attention(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seq_lens: list[int], size: int
) -> torch.Tensor:
    """Paged attention in plain torch, one query a request, page size `size`: [R, Hq, D]."""
    keys, values = cache.transpose(1, 2).split(query.shape[2], dim=-1)
    groups = query.shape[1] // keys.shape[2]
    out = []
    for q, pages, length in zip(query, table[: len(query)], seq_lens, strict=True):
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


def test_page_size_one_reads_rows_with_and_without_holes_in_one_table(cache: torch.Tensor) -> None:
    """Rows 0 and 2 are positional; row 1 has holes, whose dead slots must not be read."""
    blocks = {"a": [5, 9, 2], "b": [7, 3], "c": [1]}
    live = [7 * S, 7 * S + 3, 3 * S + 1]
    lengths = [10, len(live), 3]
    query = torch.randn(3, 4, 8)
    inputs = Inputs()
    mirrors = mirrors_of({"b": np.array(live)})
    inputs.present(mirrors, dict.fromkeys("abc", 1), blocks, {"a": 10, "b": 8, "c": 3})
    tables = inputs.tables
    assert tables.seq_lens[:3].tolist() == inputs.max_lens == lengths
    got = attention(query, page_view(cache), tables.pages, lengths, 1)
    table = torch.tensor([own + [0] * (3 - len(own)) for own in blocks.values()])
    dense = attention(query, cache, table, [10, 8, 3], S)
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
    """Not even where all holes are closed: a planned row is read in logical order."""
    query = torch.randn(1, 4, 8)
    slots = torch.randperm(BLOCKS * S)[:30].tolist()
    there = [slot for slot in range(BLOCKS * S) if slot not in slots][::-1][:30]
    moved = cache.clone(memory_format=torch.preserve_format)
    page_view(moved)[there] = page_view(cache)[slots]
    results = []
    for memory, place in ((cache, slots), (moved, there)):
        inputs = Inputs()
        inputs.present(mirrors_of({"a": np.array(place)}), {"a": 1})
        results.append(attention(query, page_view(memory), inputs.tables.pages[:1], [30], 1))
    assert torch.equal(*results)


def test_the_tables_never_move() -> None:
    """Captured graphs read these addresses."""
    walk = Walk(1)
    tables = walk.inputs.tables
    places = [t.data_ptr() for t in (tables.pages, tables.seq_lens)]
    run(walk, 10)
    assert [t.data_ptr() for t in (tables.pages, tables.seq_lens)] == places


def test_more_requests_than_rows_are_refused() -> None:
    inputs = Inputs()
    mirrors = mirrors_of({name: np.arange(3) for name in "abcde"})
    with pytest.raises(IndexError):
        inputs.present(mirrors, dict.fromkeys("abcde", 1))
