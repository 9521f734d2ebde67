"""Signals on a device, up to the device calls: two ranks report the host's scores, memory follows
the live tokens, and scores are waited for where the sampled tokens are.

`test_cuda_late.py` has one rank whose scores are read late; there, reading the device's memory is
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support import filled
from tests.support.torch_kernels import signals_in_torch
from tests.support.two_workers import SIGNALS, DeviceWorker, Life, Worker
from vtoken.base.arrays import Floats
from vtoken.core.protocol.step import WorkerReport
from vtoken.policies.signals import Signal
from vtoken.vllm.cuda.copies.streams import Streams
from vtoken.vllm.cuda.signals.accumulators import DeviceAccumulator
from vtoken.vllm.worker.delivery import attach_report
from vtoken.vllm.worker.heads import RankHeads
from vtoken.vllm.worker.ranks import Ranks

pytestmark = pytest.mark.vllm

Scores = dict[tuple[str, Signal], Floats]


@pytest.fixture(scope="module", autouse=True)
def _signals_in_torch() -> Iterator[None]:
    with signals_in_torch():
        yield


def differences(one: Scores, other: Scores) -> list[str]:
    """The scores of `other` that differ by more than rounding."""
    wrong = [f"{key} is reported by only one" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        same = len(one[key]) == len(other[key])
        if not (same and np.allclose(one[key], other[key], rtol=1e-6, atol=5e-7)):
            wrong.append(f"{key} differs")
    return wrong


def alive(scores: Scores, live: dict[str, set[int]]) -> Scores:
    """The scores of tokens that were live then; those of dead tokens have no meaning."""
    return {
        (name, signal): values[sorted(t for t in live[name] if t < len(values))]
        for (name, signal), values in scores.items()
    }


class OneOfTwo(Ranks):
    """One of two ranks in this process, a thread each, which meet to reduce."""

    def __init__(self, rank: int, meet: Barrier, parts: list[Any]) -> None:
        self.heads = RankHeads(rank, 2)
        self._rank, self._meet, self._parts = rank, meet, parts

    def _reduced(self, parts: Any, reduce: Callable[..., torch.Tensor]) -> Any:
        self._parts[self._rank] = parts
        self._meet.wait()
        one, other = self._parts
        assert one.keys() == other.keys()
        found = {key: reduce(one[key], other[key]) for key in one}
        self._meet.wait()
        return found

    def sum(self, parts: Any) -> Any:
        return self._reduced(parts, torch.add)

    def max(self, parts: Any) -> Any:
        return self._reduced(parts, torch.maximum)


class Apart(OneOfTwo):
    """A rank that reduces nothing."""

    def _reduced(self, parts: Any, reduce: Callable[..., torch.Tensor]) -> Any:  # noqa: ARG002
        return parts


def run_two_ranks(
    seed: int, kind: type[OneOfTwo], *, returns: bool = False
) -> tuple[list[str], int]:
    """Each has one of the two KV heads, and the query heads that read it. `returns`: see `Life`.

    Returns the differences from one rank on the host, and the number of scores.
    """
    life, meet, parts = Life(seed, returns=returns), Barrier(2, timeout=60), [None, None]
    host = Worker(life)
    ranks = [DeviceWorker(life, Streams(), ranks=kind(rank, meet, parts)) for rank in range(2)]
    wrong, num_scores = [], 0
    tables_in_python = patch("vtoken.vllm.cuda.kernels.fill_tables", filled.fill_tables)
    with tables_in_python, ThreadPoolExecutor(2) as threads:
        for _ in range(30 if returns else 20):
            plan, batch, query = life.next()
            expected = host.step(plan, batch, query)()
            live = {name: set(tokens) for name, tokens in life.live.items()}
            pending = [
                threads.submit(worker.step, plan, batch, half)
                for worker, half in zip(ranks, query.chunk(2, dim=1), strict=True)
            ]
            for future in pending:
                found = future.result()()
                num_scores += len(found)
                wrong += differences(alive(expected, live), alive(found, live))
    return wrong, num_scores


@pytest.mark.parametrize("returns", [False, True], ids=["tokens die", "and come back"])
@pytest.mark.parametrize("seed", range(2))
def test_two_ranks_report_what_one_rank_reports(seed: int, returns: bool) -> None:
    wrong, num_scores = run_two_ranks(seed, OneOfTwo, returns=returns)
    assert wrong == []
    assert num_scores > 100


def test_control_live_tokens_that_are_only_counted_are_not_told_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many died as came back between two queries."""
    known = DeviceAccumulator._change_to

    def if_fewer(self: DeviceAccumulator, ids: Any) -> Any:
        return known(self, ids) if np.searchsorted(ids, self.num_tokens) < len(self.ids) else None

    monkeypatch.setattr(DeviceAccumulator, "_change_to", if_fewer)
    wrong, _ = run_two_ranks(0, OneOfTwo, returns=True)
    assert {"attention_sum", "attention_window"} <= {text.split("'")[3] for text in wrong}


def test_control_ranks_that_reduce_nothing_are_noticed() -> None:
    wrong, _ = run_two_ranks(0, Apart)
    assert {"attention_sum", "attention_max", "key_norm"} <= {text.split("'")[3] for text in wrong}


@pytest.mark.parametrize(
    ("signal", "bytes_a_token", "bytes_a_dead_token"),
    [(Signal("attention_sum"), 4, 4), (Signal("attention_window", 64), 256, 0)],
    ids=str,
)
def test_device_memory_follows_the_live_tokens_and_that_of_sums_also_the_dead_ones(
    signal: Signal, bytes_a_token: int, bytes_a_dead_token: int
) -> None:
    accumulator: Any = DeviceAccumulator(signal, torch.device("cpu"))
    ids = np.arange(8000)
    accumulator.add(ids, torch.zeros(1, 8000), 1)
    assert accumulator.data.nbytes <= 1.3 * 8000 * bytes_a_token
    assert accumulator.of_dead.nbytes == 0
    accumulator.add(ids[-500:] + 1, torch.zeros(1, 500), 1)
    assert accumulator.data.nbytes <= 2 * 500 * bytes_a_token
    assert accumulator.of_dead.nbytes <= 1.3 * 8000 * bytes_a_dead_token


# ---------------------------------------------------------------- the report and the tokens


class Fetched:
    """vLLM's asynchronous output of either runner: `inner` once the device has sampled."""

    def __init__(self, name: str) -> None:
        self.inner = SimpleNamespace(sampled=False)
        setattr(self, name, self.inner)

    def get_output(self) -> Any:
        self.inner.sampled = True
        return self.inner


@pytest.mark.parametrize("name", ["_model_runner_output", "model_runner_output"], ids=["V1", "V2"])
def test_scores_are_waited_for_where_the_sampled_tokens_are(name: str) -> None:
    output: Any = Fetched(name)
    scores = {("a", SIGNALS["a"][0]): np.ones(3, dtype=np.float32)}
    order: list[bool] = []

    def pending() -> Scores:
        order.append(output.inner.sampled)
        return scores

    sent = attach_report(output, WorkerReport(7), pending)
    assert order == []  # attached, without waiting
    fetched = sent.get_output()
    assert fetched is output.inner
    assert order == [True]
    assert (fetched.vtoken.step, fetched.vtoken.scores) == (7, scores)


def test_a_report_without_scores_leaves_vllms_output_unchanged() -> None:
    output: Any = Fetched("model_runner_output")
    assert attach_report(output, WorkerReport(7), None) is output
    assert output.inner.vtoken.step == 7
