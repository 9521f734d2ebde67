"""Rows and key signals of every aggregate against the definition, head by head; complete and in the
parts that tensor-parallel ranks hold.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import plain_signals
from tests.support.mirrors import mirrors_of
from vtoken.core.protocol.mirror import BlockTables
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Signal
from vtoken.policies.signals import pooled as pooled_on_host
from vtoken.vllm.worker import probe as probing
from vtoken.vllm.worker.heads import RankHeads
from vtoken.vllm.worker.probe import (
    ProbedRequest,
    folded,
    key_redundancy,
    key_values,
    pooled,
    probe,
)
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import HostScores

pytestmark = pytest.mark.vllm

LAYERS, KV_HEADS, HEADS, DIM, S, LIVE, NEW = 3, 2, 6, 8, 4, 21, 5
SCALE = 0.4
MEAN, MAX = "mean", "max"
AGGREGATES = [
    (over_heads, over_layers, layers, heads)
    for over_heads, over_layers in product((MEAN, MAX), repeat=2)
    for layers in ((1,), (0, 2))
    for heads in ((), (4,), (0, 1, 5))
]


class Memory:
    """Random caches and queries; one request whose live tokens are anywhere."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.keys = [torch.randn(16, S, KV_HEADS, DIM) for _ in range(LAYERS)]
        self.queries = [torch.randn(NEW, HEADS, DIM) for _ in range(LAYERS)]
        self.slots = torch.randperm(16 * S)[:LIVE]
        self.sinks: list[torch.Tensor] | None = None

    def rows(self, signal: Signal, heads: RankHeads, num_new: int) -> torch.Tensor:
        """The parts of a rank's probe, over its own heads."""
        mirror: Any = None
        request = ProbedRequest("a", 0, num_new, mirror, signal, np.arange(LIVE), self.slots, heads)
        for layer in range(LAYERS):
            query = mine(self.queries[layer], heads)[-num_new:]
            sinks = None if self.sinks is None else mine(self.sinks[layer][None], heads)[0]
            probe(
                [request], layer, query, mine_of_keys(self.keys[layer], heads),
                scale=SCALE, soft_cap=0.0, sinks=sinks,
            )  # fmt: skip
        assert request.rows is not None
        return request.rows

    def keys_of(self, signal: Signal, heads: RankHeads) -> torch.Tensor:
        layers = {i: mine_of_keys(self.keys[layer], heads) for i, layer in enumerate(signal.layers)}
        anchors: Any = {} if signal.anchor == "seen" else None
        num_heads = HEADS // heads.num_ranks
        return key_values(signal, self.slots, layers, num_heads, heads, anchors, LIVE)

    def redundancy_of(self, signal: Signal, heads: RankHeads) -> torch.Tensor:
        layers = [mine_of_keys(self.keys[layer], heads) for layer in signal.layers]
        return key_redundancy(signal, self.slots, layers, HEADS // heads.num_ranks, heads)

    def flat(self, layer: int) -> torch.Tensor:
        """The keys [n, Hkv, D] of the live tokens."""
        return self.keys[layer].flatten(0, 1)[self.slots].double()


def mine(query: torch.Tensor, heads: RankHeads) -> torch.Tensor:
    """The query heads of a rank."""
    each = HEADS // heads.num_ranks
    return query[:, heads.rank * each : (heads.rank + 1) * each]


def mine_of_keys(key: torch.Tensor, heads: RankHeads) -> torch.Tensor:
    """The KV heads of a rank; with more ranks than heads, a copy of the one it reads."""
    first = heads.rank * KV_HEADS // heads.num_ranks
    return key[:, :, first : first + max(1, KV_HEADS // heads.num_ranks)]


def over(values: list[torch.Tensor], how: str) -> torch.Tensor:
    stacked = torch.stack(values)
    return stacked.max(dim=0).values if how == MAX else stacked.mean(dim=0)


def expected_rows(memory: Memory, signal: Signal, num_new: int) -> torch.Tensor:
    """By the definition: softmax of every query and head, then heads, then layers."""
    of_layers = []
    for layer in signal.layers:
        key, of_heads = memory.flat(layer), []
        for head in signal.heads or range(HEADS):
            rows = torch.zeros(num_new, LIVE, dtype=torch.float64)
            for number in range(num_new):
                query = memory.queries[layer][NEW - num_new + number, head].double()
                seen = LIVE - num_new + number + 1
                logits = SCALE * key[:seen, head * KV_HEADS // HEADS] @ query
                if memory.sinks is not None:
                    logits = torch.cat([logits, memory.sinks[layer][head : head + 1].double()])
                rows[number, :seen] = torch.softmax(logits, dim=0)[:seen]
            of_heads.append(rows)
        of_layers.append(over(of_heads, signal.over_heads))
    rows = over(of_layers, signal.over_layers)
    if signal.sums_rows:
        return rows.sum(dim=0, keepdim=True)
    return rows[-signal.num_rows(num_new) :]


def expected_keys(memory: Memory, signal: Signal, seen: torch.Tensor | None = None) -> torch.Tensor:
    """`seen`: the slots of the tokens that the anchor is made of, by default the live ones."""
    of_layers = []
    for layer in signal.layers:
        key, of_heads = memory.flat(layer), []
        anchors = key if seen is None else memory.keys[layer].flatten(0, 1)[seen].double()
        for head in signal.heads or range(HEADS):
            of_head = [k[:, head * KV_HEADS // HEADS].numpy() for k in (key, anchors)]
            of_heads.append(torch.from_numpy(plain_signals.of_keys(signal.kind, *of_head)))
        of_layers.append(over(of_heads, signal.over_heads))
    return over(of_layers, signal.over_layers)


def expected_redundancy(memory: Memory, signal: Signal) -> torch.Tensor:
    found = []
    for layer, head in product(signal.layers, signal.heads or range(HEADS)):
        key = memory.flat(layer)[:, head * KV_HEADS // HEADS]
        found.append(plain_signals.redundancy(key.numpy()))
    return torch.from_numpy(np.mean(found, axis=0))


def signals(kind: Any, window: int = 0) -> list[Signal]:
    return [
        Signal(kind, window, over_heads, over_layers, layers=layers, heads=heads)
        for over_heads, over_layers, layers, heads in AGGREGATES
        if kind != "attention_sum" or (over_heads, over_layers) == (MEAN, MEAN)
    ]


ROWS = signals("attention_window", 3) + signals("attention_sum")
LIVE_KEYS = signals("key_norm") + signals("key_difference")
SEEN_KEYS = [replace(signal, anchor="seen") for signal in signals("key_difference")]
KEYS = LIVE_KEYS + SEEN_KEYS
MIXED = [
    Signal("attention_window", 3, layers=layers, heads=heads, mix_lambda=0.1)
    for layers in ((1,), (0, 2))
    for heads in ((), (4,), (0, 1, 5))
]


def together(signal: Signal, parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts of ranks: means add up, maxima combine by maximum."""
    stacked = torch.stack(parts)
    return stacked.amax(dim=0) if signal.over_heads == MAX else stacked.sum(dim=0)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "with sinks"])
@pytest.mark.parametrize("num_ranks", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("num_new", [1, NEW], ids=["one query", "a chunk"])
@pytest.mark.parametrize("signal", ROWS, ids=str)
def test_rows_are_those_of_the_definition(
    signal: Signal, num_new: int, num_ranks: int, *, sinks: bool
) -> None:
    memory = Memory()
    without = expected_rows(memory, signal, num_new)
    if sinks:
        memory.sinks = [2.0 + torch.randn(HEADS) for _ in range(LAYERS)]
    parts = [memory.rows(signal, RankHeads(rank, num_ranks), num_new) for rank in range(num_ranks)]
    expected = expected_rows(memory, signal, num_new)
    found = folded(signal, together(signal, parts)).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert (float((without - expected).abs().max()) > 1e-3) == sinks


@pytest.mark.parametrize("signal", KEYS, ids=str)
def test_key_signals_are_those_of_the_definition(signal: Signal) -> None:
    memory = Memory()
    found = folded(signal, memory.keys_of(signal, RankHeads()))
    expected = expected_keys(memory, signal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads_at_once", [1, KV_HEADS])
@pytest.mark.parametrize("signal", SEEN_KEYS, ids=str)
def test_an_anchor_of_all_tokens_seen_keeps_those_that_died(
    signal: Signal, heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read 12 tokens; then two died and six came; then one died; then the request starts anew."""
    monkeypatch.setattr(probing, "MAX_KEYS", 1 if heads_at_once == 1 else 4096)
    memory, num_tokens = Memory(), 18
    slots = memory.slots[:num_tokens]
    mirrors = mirrors_of({"a": slots.numpy()})
    scores = HostScores(memory.keys.__getitem__, HEADS)
    plan = StepPlan(0)
    plan.want_scores = (("a", signal),)

    def read(dead: list[int], num: int) -> torch.Tensor:
        columns, first = mirrors.columns, int(mirrors.columns.first_token[mirrors["a"].row])
        columns.slots[first : first + num] = slots[:num].numpy()
        columns.slots[[first + token for token in dead]] = -1
        columns.num_tokens[mirrors["a"].row] = num
        columns.num_live[mirrors["a"].row] = num - len(dead)
        found = scores.finish([], plan, mirrors, Ranks())()["a", signal]
        alive = [token for token in range(num) if token not in dead]
        memory.slots = slots[alive]
        return torch.from_numpy(found[alive]).double()

    close = {"rtol": 1e-5, "atol": 1e-6}
    for dead, num in (([], 12), ([2, 7], num_tokens), ([2, 7, 11], num_tokens)):
        found = read(dead, num)
        torch.testing.assert_close(found, expected_keys(memory, signal, slots[:num]), **close)
    assert float((found - expected_keys(memory, signal)).abs().max()) > 1e-3
    mirrors.drop(["a"])
    mirrors.place(["a"], np.array([num_tokens]), S, BlockTables.of([[1, 2, 3, 4, 5]]))
    slots = torch.arange(S, S + num_tokens)
    found = read([2], num_tokens)
    torch.testing.assert_close(found, expected_keys(memory, signal), **close)


@pytest.mark.parametrize("rows_at_once", [1, 4, 64])
@pytest.mark.parametrize("signal", MIXED, ids=str)
def test_redundancy_is_that_of_the_definition(
    signal: Signal, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "MAX_COSINES", 0)
    monkeypatch.setattr(probing, "MIN_COSINE_ROWS", rows_at_once)
    memory = Memory()
    found = memory.redundancy_of(signal, RankHeads())
    expected = expected_redundancy(memory, signal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)
    assert float(expected.sum()) == pytest.approx(1)


@pytest.mark.parametrize("num_ranks", [2, 6], ids=["a KV head each", "copies of KV heads"])
@pytest.mark.parametrize("signal", MIXED, ids=str)
def test_the_redundancy_of_ranks_adds_up(signal: Signal, num_ranks: int) -> None:
    memory = Memory()
    parts = [memory.redundancy_of(signal, RankHeads(rank, num_ranks)) for rank in range(num_ranks)]
    expected = memory.redundancy_of(signal, RankHeads())
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), expected, rtol=1e-5, atol=0.0)


def test_tokens_that_died_or_came_back_since_the_newest_probe_have_no_score() -> None:
    """Token 2 died, token 5 came back and the newest was not probed. The keys of the latter two
    count.
    """
    memory, signal = Memory(), Signal("attention_last", layers=(1,), mix_lambda=0.3)
    mirrors = mirrors_of({"a": memory.slots.numpy()})
    scores = HostScores(memory.keys.__getitem__, HEADS)
    mirrors["a"].keep((signal,), scores.make_accumulator)
    row, probed = np.linspace(0, 1, LIVE, dtype=np.float32), np.delete(np.arange(LIVE - 1), 5)
    mirrors["a"].accumulators[signal].add(probed, row[None, probed], LIVE - 1)
    mirrors.columns.slots[mirrors.columns.first_token[0] + 2] = -1
    mirrors.columns.num_live[0] -= 1
    plan = StepPlan(0)
    plan.want_scores = (("a", signal),)
    found = scores.finish([], plan, mirrors, Ranks())()["a", signal]
    alive = np.delete(np.arange(LIVE), 2)
    memory.slots = memory.slots[alive]
    repeated = memory.redundancy_of(signal, RankHeads()).numpy()
    assert np.flatnonzero(np.isinf(found)).tolist() == [2, 5]
    assert len(found) == LIVE - 1
    expected = 0.3 * row[alive] - 0.7 * repeated
    known = np.isin(alive, probed)
    np.testing.assert_allclose(found[alive[known]], expected[known], rtol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 6], ids=["a KV head each", "copies of KV heads"])
@pytest.mark.parametrize("signal", ROWS + KEYS, ids=str)
def test_the_parts_of_ranks_combine_to_the_result_of_one_rank(
    signal: Signal, num_ranks: int
) -> None:
    """Also for a rank without any of the heads."""
    memory = Memory()

    def part(heads: RankHeads) -> torch.Tensor:
        if signal.of_keys:
            return memory.keys_of(signal, heads)
        return memory.rows(signal, heads, NEW)

    parts = [part(RankHeads(rank, num_ranks)) for rank in range(num_ranks)]
    expected = folded(signal, part(RankHeads()))
    found = folded(signal, together(signal, parts))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if signal.is_linear and not signal.of_keys:  # so they may be added up when they are reported
        later = torch.stack([folded(signal, one) for one in parts]).sum(dim=0)
        torch.testing.assert_close(later, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["attention_last", "key_norm"])
@pytest.mark.parametrize("pool", [MEAN, MAX])
@pytest.mark.parametrize("num_live", [1, 2, 9, 40])
@pytest.mark.parametrize("radius", [0, 1, 3, 32])
def test_neighbours_are_pooled_on_a_device_as_on_the_host(
    kind: Any, pool: Any, num_live: int, radius: int
) -> None:
    signal = Signal(kind, pool=pool, pool_radius=radius)
    values = torch.randn(num_live)
    expected = torch.from_numpy(pooled_on_host(signal, values.numpy()))
    torch.testing.assert_close(pooled(signal, values), expected, rtol=1e-5, atol=1e-6)
