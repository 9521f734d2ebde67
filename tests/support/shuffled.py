"""vToken's Triton kernels in Triton's interpreter, with their programs in random order.

    python -m tests.support.shuffled

prints one JSON document: what was wrong, by kernel, over random shapes. A program that reads what
another one writes gives other results in another order. NaN surround every buffer, and fill every
new one: a write beside it is seen in what surrounds it, a read in the result. Two kernels with
planted mistakes are controls. It needs its own process, because importing Triton selects the
interpreter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, product
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from tests.support import filled
from tests.support.torch_kernels import signals_in_torch
from vtoken.policies.signals import Signal
from vtoken.policies.signals.kind import BUILT_IN
from vtoken.vllm.cuda import kernels
from vtoken.vllm.cuda.signals import kernels as signal_kernels
from vtoken.vllm.cuda.signals import probe_kernels
from vtoken.vllm.cuda.signals import tables as signal_tables
from vtoken.vllm.cuda.signals.probing import KINDS
from vtoken.vllm.cuda.signals.tables import Additions, Addresses, KeyReadings, Readings, Table
from vtoken.vllm.worker.probe import folded

MARGIN = 64  # words around a buffer
EXAMPLES = int(os.environ.get("VTOKEN_INTERLEAVINGS", "12"))


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Launches inside run their programs in an order of `seed`."""
    builder, random = interpreter.interpreter_builder, Random(seed)
    order: list[tuple[int, ...]] = []

    def set_grid_dim(*dims: int) -> None:
        order[:] = product(*map(range, dims))
        random.shuffle(order)
        type(builder).set_grid_dim(builder, *dims)

    def set_grid_idx(*_: int) -> None:
        type(builder).set_grid_idx(builder, *order.pop())

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_dim, builder.set_grid_idx


class Guarded:
    """Buffers within memory that holds NaN, and -1 in 64-bit integers."""

    def __init__(self) -> None:
        self._all: list[tuple[torch.Tensor, int, int]] = []

    def buffer(self, *shape: int, dtype: torch.dtype, fill: int | float | None) -> torch.Tensor:
        """A buffer of `shape` that holds `fill`; None: what surrounds it."""
        size = torch.Size(shape).numel()
        memory = torch.full(((size + 2 * MARGIN) * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        held = memory.view(dtype)[MARGIN : MARGIN + size]
        if fill is not None:
            held.fill_(fill)
        self._all.append((memory, MARGIN * dtype.itemsize, size * dtype.itemsize))
        return held.view(shape)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        held = self.buffer(*values.shape, dtype=values.dtype, fill=None)
        return held.copy_(values)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:  # noqa: ARG002
        """For `torch.empty` in a kernel's caller."""
        return self.buffer(*shape, dtype=dtype, fill=None)

    def empty_like(self, other: torch.Tensor) -> torch.Tensor:
        return self.buffer(*other.shape, dtype=other.dtype, fill=None)

    def check(self) -> None:
        for memory, start, length in self._all:
            outside = torch.cat([memory[:start], memory[start + length :]])
            assert bool((outside == 0xFF).all()), "a write beside a buffer"


def in_orders(run: Callable[[Guarded], torch.Tensor]) -> torch.Tensor:
    """The result of `run`, the same bits in three orders of its programs."""
    found = []
    for seed in range(3):
        guarded = Guarded()
        with shuffled(seed):
            found.append(run(guarded))
        guarded.check()
    for other in found[1:]:
        assert torch.equal(found[0].nan_to_num(7e7), other.nan_to_num(7e7)), "order decides"
    return found[0]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    layers=st.integers(1, 3),
    num_tokens=st.integers(1, 9),
    row_words=st.sampled_from([1, 3, 8, 36, kernels.MAX_WORDS + 4]),
    shift=st.integers(0, 3),
)
def copies(layers: int, num_tokens: int, row_words: int, shift: int) -> None:
    """Every row of every layer arrives, at any alignment; nothing else changes."""
    slots = 2 * num_tokens + 3
    torch.manual_seed(num_tokens)
    order, values = torch.randperm(slots), torch.randn(layers, slots * row_words)
    source, destination = order[:num_tokens], order[num_tokens : 2 * num_tokens]

    def run(guarded: Guarded) -> torch.Tensor:
        rows = []
        for layer in values:
            held = guarded.buffer(slots * row_words + shift, dtype=torch.float32, fill=0.0)
            held[shift:] = layer
            rows.append(held[shift:].view(slots, row_words))
        copy = kernels.TritonSlotCopy(rows)
        ends = guarded.of(source), guarded.of(destination)
        copy(*ends)
        copy(*ends)  # a program that runs twice changes nothing
        return torch.stack(rows)

    expected = values.view(layers, slots, row_words).clone()
    expected[:, destination] = expected[:, source]
    assert torch.equal(in_orders(run), expected), "copied rows"


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    layers=st.integers(1, 3),
    num_tokens=st.integers(1, 9),
    row_words=st.sampled_from([1, 3, 8, 36, kernels.MAX_WORDS + 4]),
    shift=st.integers(0, 3),
)
def host_rows(layers: int, num_tokens: int, row_words: int, shift: int) -> None:
    """Rows of all layers leave their slots and return to others, at any alignment; nothing else
    changes.
    """
    slots = 2 * num_tokens + 3
    torch.manual_seed(num_tokens)
    order, values = torch.randperm(slots), torch.randn(layers, slots, row_words)
    source, target = order[:num_tokens], order[num_tokens : 2 * num_tokens]

    def run(guarded: Guarded) -> torch.Tensor:
        held = []
        for layer in values:
            buffer = guarded.buffer(slots * row_words + shift, dtype=torch.float32, fill=0.0)
            held.append(buffer[shift:].view(slots, row_words).copy_(layer))
        size = num_tokens * layers * row_words
        rows = guarded.buffer(size + shift, dtype=torch.float32, fill=0.0)[shift:]
        rows = rows.view(num_tokens, layers, row_words)
        copies = kernels.TritonHostRows(held)
        for _ in range(2):  # a program that runs twice changes nothing
            copies.gather(guarded.of(source), rows)
        assert torch.equal(rows, values[:, source].transpose(0, 1)), "gathered rows"
        for _ in range(2):
            copies.scatter(rows, guarded.of(target))
        return torch.stack(held)

    expected = values.clone()
    expected[:, target] = expected[:, source]
    assert torch.equal(in_orders(run), expected), "scattered rows"


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["positional", "kept", "sent", "padding"]), st.integers(1, 40)),
        min_size=1,
        max_size=4,
    ),
    new=st.integers(1, 3),
    size=st.sampled_from([4, 6]),
    columns=st.sampled_from([8, 64]),
)
def tables(rows: list[tuple[str, int]], new: int, size: int, columns: int) -> None:
    """Page tables, lengths, resident rows and slots equal the kernel's in plain Python, for every
    kind of row and any length, in one tile or several.
    """
    random = Random(str(rows))
    width, sent, header, first = 48, [], torch.zeros(6, len(rows), dtype=torch.int32), 0
    lengths = torch.zeros(len(rows), dtype=torch.int32)
    own = random.sample(range(len(rows)), len(rows))
    for row, (kind, length) in enumerate(rows):
        if kind == "positional":
            lengths[row] = length
        if kind in ("kept", "sent"):
            length += new
            old = length - new
            kept = old if kind == "kept" else 0
            facts = [length, old, kept, len(sent) - kept, first - old, own[row]]
            header[:, row] = torch.tensor(facts, dtype=torch.int32)
            sent += [random.randrange(1, 999) for _ in range(length - kept)]
        first += new
    blocks = torch.randint(0, 60, (len(rows), -(-width // size)), dtype=torch.int32)
    held = torch.randint(1000, 1999, (len(rows), width), dtype=torch.int32)
    given = header, torch.tensor(sent or [0], dtype=torch.int32), blocks, lengths

    def outputs(guarded: Guarded) -> tuple[torch.Tensor, ...]:
        shape = len(rows), width
        return (
            guarded.of(held),
            guarded.buffer(*shape, dtype=torch.int32, fill=-7),
            guarded.buffer(len(rows), dtype=torch.int32, fill=-7),
            guarded.buffer(first, dtype=torch.int64, fill=-7),
        )

    def run(guarded: Guarded) -> torch.Tensor:
        resident, pages, seq_lens, mapping = made = outputs(guarded)
        inputs = [guarded.of(part) for part in given]
        here = SimpleNamespace(resident=resident, pages=pages, seq_lens=seq_lens)
        for _ in range(2):  # a launch that runs twice changes nothing
            kernels.fill_tables(*inputs, here, mapping, block_size=size, width=width)
        return torch.cat([part.flatten() for part in made])

    expected = outputs(Guarded())
    filled.fill(*given, *expected, size, width)
    before, kernels.COLUMNS_PER_PROGRAM = kernels.COLUMNS_PER_PROGRAM, columns
    try:
        found = in_orders(run)
    finally:
        kernels.COLUMNS_PER_PROGRAM = before
    assert torch.equal(found, torch.cat([part.flatten() for part in expected])), "tables"


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    dim=st.sampled_from([8, 24]),
    use_max=st.booleans(),
    sinks=st.booleans(),
    soft_cap=st.sampled_from([0.0, 2.0]),
    max_logits=st.sampled_from([1, probe_kernels.MAX_LOGITS]),
)
def probes(
    lengths: list[int],
    heads: int,
    group: int,
    dim: int,
    soft_cap: float,
    max_logits: int,
    *,
    use_max: bool,
    sinks: bool,
) -> None:
    """Scores equal plain torch for any lengths; rows end where their requests do. With and without
    attention sinks and a cap of the logits; all requests at once, and one by one.
    """
    torch.manual_seed(len(lengths))
    width, requests, query_heads = max(lengths), len(lengths), heads * group
    slots = sum(lengths) + 1  # the last one holds NaN
    keys = torch.randn(slots, heads, dim)
    keys[-1] = float("nan")
    query = torch.randn(requests, query_heads, dim)
    table = torch.full((requests, width), slots - 1, dtype=torch.int32)
    places = torch.randperm(slots - 1).split(lengths)
    for row, own in zip(table, places, strict=True):
        row[: len(own)] = own
    chosen = torch.arange(query_heads, dtype=torch.int32)[:: 1 + use_max]
    sink = 3.0 + torch.randn(query_heads) if sinks else torch.full((query_heads,), -torch.inf)
    expected = torch.full((requests, width), 0.25)
    for number, own in enumerate(places):
        k = keys[own].repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,nhd->hn", query[number], k) * 0.3
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        weights = torch.softmax(torch.cat([logits, sink[:, None]], dim=1), dim=-1)[:, :-1]
        weights = weights[chosen.long()]
        top = weights.amax(dim=0).clamp(min=0.25)
        mean = 0.25 + weights.sum(dim=0) / len(chosen)
        expected[number, : len(own)] = top if use_max else mean

    def run(guarded: Guarded) -> torch.Tensor:
        scores = guarded.buffer(requests, width, dtype=torch.float32, fill=0.25)
        each = guarded.of(torch.arange(requests, dtype=torch.int32))
        arguments = (guarded.of(query), guarded.of(keys), guarded.of(table))
        given = {
            "queries": each,
            "rows": each,
            "heads": guarded.of(chosen),
            "sinks": guarded.of(sink),
        }
        seq_lens = guarded.of(torch.tensor(lengths, dtype=torch.int32))
        with (
            patch.object(probe_kernels, "torch", _Empty(guarded)),
            patch.object(probe_kernels, "MAX_LOGITS", max_logits),
        ):
            probe_kernels.probe_scores(
                *arguments,
                seq_lens,
                scores,
                scale=0.3,
                divisor=len(chosen),
                use_max=use_max,
                soft_cap=soft_cap,
                **given,
            )
        return scores

    found = in_orders(run)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5), "scores"


class _Empty:
    """torch, whose new tensors are guarded."""

    def __init__(self, guarded: Guarded) -> None:
        self.empty, self.empty_like = guarded.empty, guarded.empty_like

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Staging:
    """Tables that are on the device at once, in guarded buffers."""

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded

    def put(self, array: Any) -> Any:
        return SimpleNamespace(on_device=self._guarded.of(torch.from_numpy(array)))


LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=3)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    lengths=LENGTHS,
    heads=st.integers(1, 3),
    dim=st.sampled_from([8, 24]),
    use_max=st.booleans(),
    anchored=st.booleans(),
    radius=st.integers(0, 3),
)
def keys(
    lengths: list[int], heads: int, dim: int, radius: int, *, use_max: bool, anchored: bool
) -> None:
    """Key signals equal plain torch: two layers, two readings, one KV head that is not read."""
    torch.manual_seed(len(lengths))
    aggregate, kind = ("max", "mean")[not use_max], ("key_norm", "key_difference")[anchored]
    layers = (0, 1)
    signal = Signal(kind, 0, aggregate, aggregate, aggregate, radius, layers=layers)
    slots, width = sum(lengths) + 1, max(lengths)  # the last slot holds NaN
    caches = torch.randn(2, slots, heads, dim)
    caches[:, -1] = float("nan")
    pages = torch.full((len(lengths), width), slots - 1, dtype=torch.int32)
    for row, own in zip(pages, torch.randperm(slots - 1).split(lengths), strict=True):
        row[: len(own)] = own
    weights = [torch.arange(heads).float() / heads for _ in layers]
    starts = [0, *accumulate(lengths)]
    halves = [max(1, n // 2) for n in lengths]

    def run(guarded: Guarded) -> torch.Tensor:
        kept = (len(lengths), 2, heads, dim)
        anchors = guarded.buffer(*kept, dtype=torch.float32, fill=None) if anchored else None
        there = guarded.of(pages)
        of_layers = [guarded.of(cache) for cache in caches]
        outbox = guarded.buffer(sum(lengths), dtype=torch.float32, fill=None)
        for first, ends in (([0] * len(lengths), halves), (halves, lengths)):
            entries = [
                (end, starts[i], i, first[i], i, int(first[i] > 0)) for i, end in enumerate(ends)
            ]
            table = Table.of(entries, _Staging(guarded))  # type: ignore[arg-type]
            shares = [guarded.of(share) for share in weights]
            readings = KeyReadings(signal, table, of_layers, shares, anchors)
            values = signal_kernels.read_keys(readings, there)
            signal_kernels.pool(signal, folded(signal, values), table, outbox)
        return outbox

    compare(run)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    lengths=LENGTHS,
    kind=st.sampled_from(sorted(KINDS)),
    over_layers=st.sampled_from(["mean", "max"]),
    radius=st.integers(0, 3),
)
def accumulators(lengths: list[int], kind: str, over_layers: Any, radius: int) -> None:
    """Accumulators equal plain torch: rows are added in place, tokens die and come back, and they
    are read.
    """
    torch.manual_seed(len(lengths))
    window = 3 if BUILT_IN[kind].queries == "window" else 0
    over_layers = "mean" if kind == "attention_sum" else over_layers
    signal = Signal(kind, window, over_layers=over_layers, pool_radius=radius, layers=(0, 1))
    parts, dtype = signal.parts, getattr(torch, BUILT_IN[kind].keeps)
    queries = [torch.rand(parts, len(lengths), max(lengths)) for _ in range(6)]
    starts = [0, *accumulate(lengths)]
    orders = [torch.randperm(n).tolist() for n in lengths]
    live = [[range(max(1, n // 3)) for n in lengths], *[[range(n) for n in lengths]] * 2]
    for some in ((0, 1, 2), (2, 3, 4)):  # fifths: two die and two come back
        chosen = [[t for i, t in enumerate(order) if i % 5 in some] for order in orders]
        live.append([sorted(own) or [0] for own in chosen])
    live.append(live[-1])

    def moved(before: Sequence[int], now: Sequence[int]) -> tuple[list[int], int]:
        """A request's part of `Additions.kept`, and how many of its tokens died."""
        sums = kind == "attention_sum"
        zeros = [-1 - t if sums else len(before) for t in now]
        found = [before.index(t) if t in before else z for t, z in zip(now, zeros, strict=True)]
        dead = [t for t in before if t not in now] if sums else []
        return [*found, *map(before.index, dead), *dead], len(dead)

    def run(guarded: Guarded) -> torch.Tensor:
        staging: Any = _Staging(guarded)
        rows = max(1, window)

        def memory(columns: list[int], fill: int | None) -> list[torch.Tensor]:
            return [guarded.buffer(rows, n, dtype=dtype, fill=fill) for n in columns]

        of_dead = [guarded.buffer(1, n, dtype=torch.float32, fill=0) for n in lengths]
        now, known = memory([n + 5 for n in lengths], 0), [0] * len(lengths)
        for number, query in enumerate(queries):
            counts = [*map(len, live[number])]
            before, columns, num_dead = now, [-1] * len(lengths), [0] * len(lengths)
            kept = None
            if number in (3, 4):
                found = [moved(*own) for own in zip(live[number - 1], live[number], strict=True)]
                kept = Table(np.concatenate([own for own, _ in found]), staging)
                columns = [0, *accumulate(len(own) for own, _ in found)][: len(lengths)]
                num_dead, known = [died for _, died in found], counts
                now = memory([n + 2 for n in counts], None)
            entries = [
                (n, i, known[i], columns[i], number % rows, b.shape[1], a.shape[1], num_dead[i])
                for i, (n, b, a) in enumerate(zip(counts, before, now, strict=True))
            ]
            tensors = before, now, of_dead
            addresses = [[data.data_ptr() for data in own] for own in tensors]
            added = Additions(
                *(signal, Table.of(entries, staging), Addresses(addresses, staging)),
                *(kept, rows, max(lengths) + 5, *tensors),
            )
            signal_kernels.accumulate(guarded.of(query), added)
            known = counts
        outbox = guarded.buffer(sum(lengths), dtype=torch.float32, fill=None)
        taken = [(n, starts[i], rows, now[i].shape[1]) for i, n in enumerate(counts)]
        table = Table.of(taken, staging)
        bases = Addresses([[data.data_ptr() for data in now]], staging)
        readings = Readings(signal, table, bases, now)
        values = signal_kernels.read_accumulators(readings)
        signal_kernels.pool(signal, values, table, outbox)
        return outbox

    compare(run)


def compare(run: Callable[[Guarded], torch.Tensor]) -> None:
    """The kernels' result in any order equals that of plain torch."""
    with signals_in_torch():
        expected = run(Guarded())

    def guarded_run(guarded: Guarded) -> torch.Tensor:
        with patch.object(signal_tables, "torch", _Empty(guarded)):
            return run(guarded)

    found = in_orders(guarded_run)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True), "numbers"


@triton.jit
def _racing_kernel(out):
    program = tl.program_id(0)
    before = tl.load(out + program - 1, mask=program > 0, other=0.0)
    tl.store(out + program, before + 1.0)


@triton.jit
def _overrunning_kernel(out, length, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros((BLOCK,), tl.float32), mask=at < length + 1)


def control_race() -> None:
    def run(guarded: Guarded) -> torch.Tensor:
        out = guarded.buffer(6, dtype=torch.float32, fill=0.0)
        _racing_kernel[(6,)](out)
        return out

    in_orders(run)


def control_overrun() -> None:
    def run(guarded: Guarded) -> torch.Tensor:
        out = guarded.buffer(6, dtype=torch.float32, fill=0.0)
        _overrunning_kernel[(2,)](out, 6, BLOCK=4)
        return out

    in_orders(run)


def main() -> None:
    found = {}
    controls = control_race, control_overrun
    for check in (copies, host_rows, tables, probes, keys, accumulators, *controls):
        try:
            check()
            found[check.__name__] = ""
        except AssertionError as error:
            found[check.__name__] = str(error).splitlines()[0]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
