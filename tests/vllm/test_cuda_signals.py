"""Signals on a device, up to the device calls: the host's scores, however late they are reported.

Two workers execute the same steps: one with the host's probe and accumulators, which is the oracle,
and one with the device's. A late device runs work on side streams only when a thread waits for it.
A device without memory (`meta`) proves that no tensor is read back.
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
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import filled
from tests.support.torch_kernels import signals_in_torch
from tests.support.two_workers import SIGNALS, DeviceWorker, Life, Worker
from vtoken.base.arrays import Floats
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import WorkerReport
from vtoken.policies.signals import Signal, make_accumulator
from vtoken.vllm.cuda.copies.streams import Stream, Streams
from vtoken.vllm.cuda.signals import scores as device_scores
from vtoken.vllm.cuda.signals.accumulators import DeviceArrays
from vtoken.vllm.cuda.signals.readings import SignalReadings
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.delivery import attach_report
from vtoken.vllm.worker.executor import Batch, PhysicalStep
from vtoken.vllm.worker.heads import RankHeads
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import PendingScores

pytestmark = pytest.mark.vllm

Scores = dict[tuple[str, Signal], Floats]


@pytest.fixture(scope="module", autouse=True)
def _signals_in_torch() -> Iterator[None]:
    with signals_in_torch():
        yield


class LateStreams(Streams):
    """Runs work on side streams only when a thread waits for its end."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], None]] = []

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        assert stream is Stream.REPORT
        self._launched.append(work)

    def record(self, stream: Stream) -> Any:  # noqa: ARG002
        return len(self._launched)

    def synchronize(self, event: Any) -> None:
        for number, work in enumerate(self._launched[:event]):
            work()
            self._launched[number] = lambda: None


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


def run_two_workers(seed: int, *, late_steps: int, steps: int = 30) -> tuple[list[str], int]:
    """Read the device's scores `late_steps` steps late; differences, and the number of scores."""
    life = Life(seed)
    host = Worker(life)
    device = DeviceWorker(life, LateStreams())
    waiting: list[tuple[PendingScores, Scores, dict[str, set[int]]]] = []
    wrong, num_scores = [], 0
    for number in range(steps):
        plan, rows, query = life.next()
        expected = host.step(plan, rows, query)()
        live = {name: set(tokens) for name, tokens in life.live.items()}
        waiting.append((device.step(plan, rows, query), expected, live))
        last = number + 1 == steps
        while waiting and (last or len(waiting) > late_steps):
            pending, expected, live = waiting.pop(0)
            found = pending()
            num_scores += len(found)
            wrong += differences(alive(expected, live), alive(found, live))
    return wrong, num_scores


@pytest.mark.parametrize("late_steps", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_device_reports_the_hosts_scores_however_late_they_are_read(
    seed: int, late_steps: int
) -> None:
    """Tokens are appended, evicted and moved in the meantime."""
    wrong, num_scores = run_two_workers(seed, late_steps=late_steps)
    assert wrong == []
    assert num_scores > 40


def test_control_an_outbox_that_later_steps_write_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = torch.zeros(1024)

    run = SignalReadings.run

    def into_memory(self: SignalReadings, pages: torch.Tensor, ranks: Any) -> None:
        run(self, pages, ranks)
        if (found := self.outbox) is not None:
            memory[: len(found)] = found
            self.outbox = memory[: len(found)]

    monkeypatch.setattr(SignalReadings, "run", into_memory)
    assert run_two_workers(0, late_steps=3)[0] != []


def test_control_ids_taken_when_the_answer_is_read_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish, send = DeviceScores.finish, DeviceScores._send
    mirrors: dict[str, Mirror] = {}

    def finish_and_note(
        self: DeviceScores, probed: Any, plan: Any, known: Any, *others: Any
    ) -> PendingScores:
        mirrors.update(known)
        return finish(self, probed, plan, known, *others)

    class Now(dict[Any, Any]):
        def items(self) -> Any:
            for key, (ids, num_tokens) in super().items():
                now = mirrors[key[0]].live()[0][: len(ids)]
                same_number = len(now) == len(ids)
                yield key, ((now, int(now[-1]) + 1) if same_number else (ids, num_tokens))

        def __or__(self, other: Any) -> Any:
            return Now(super().__or__(other))

    def send_late(self: DeviceScores, values: Any, owners: Any) -> PendingScores:
        if self._readings is not None:
            self._readings.owners = Now(self._readings.owners)
        return send(self, values, owners)

    monkeypatch.setattr(DeviceScores, "finish", finish_and_note)
    monkeypatch.setattr(DeviceScores, "_send", send_late)
    assert run_two_workers(0, late_steps=3)[0] != []


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


def run_two_ranks(seed: int, kind: type[OneOfTwo]) -> tuple[list[str], int]:
    """Each has one of the two KV heads, and the query heads that read it; as `run_two_workers`."""
    life, meet, parts = Life(seed), Barrier(2, timeout=60), [None, None]
    host = Worker(life)
    ranks = [DeviceWorker(life, LateStreams(), ranks=kind(rank, meet, parts)) for rank in range(2)]
    wrong, num_scores = [], 0
    tables_in_python = patch("vtoken.vllm.cuda.kernels.fill_tables", filled.fill_tables)
    with tables_in_python, ThreadPoolExecutor(2) as threads:
        for _ in range(20):
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


@pytest.mark.parametrize("seed", range(2))
def test_two_ranks_report_what_one_rank_reports(seed: int) -> None:
    wrong, num_scores = run_two_ranks(seed, OneOfTwo)
    assert wrong == []
    assert num_scores > 100


def test_control_ranks_that_reduce_nothing_are_noticed() -> None:
    wrong, _ = run_two_ranks(0, Apart)
    assert {"attention_sum", "attention_max", "key_norm"} <= {text.split("'")[3] for text in wrong}


@pytest.mark.parametrize(
    ("signal", "bytes_a_token"),
    [(Signal("attention_sum"), 4), (Signal("attention_window", 64), 256)],
    ids=str,
)
def test_device_memory_follows_the_live_tokens(signal: Signal, bytes_a_token: int) -> None:
    accumulator: Any = make_accumulator(signal, DeviceArrays(torch.device("cpu")))
    ids = np.arange(8000)
    accumulator.add(ids, torch.zeros(1, 8000), 1)
    assert accumulator.data.nbytes <= 1.3 * 8000 * bytes_a_token
    accumulator.add(ids[-500:] + 1, torch.zeros(1, 500), 1)
    assert accumulator.data.nbytes <= 2 * 500 * bytes_a_token


# ---------------------------------------------------------------- nothing waits for the device


class NothingWaits(TorchDispatchMode):
    """Refuses operations that make a host wait for a CUDA device: reading a tensor's contents,
    results whose size depends on them, and synchronous copies in either direction.
    """

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        on_device = [t for t in tensors if t.device.type == "meta"]
        if on_device and name.lstrip("_").startswith(tuple(x.lstrip("_") for x in self.LOOKS)):
            raise AssertionError(f"{name} looks at the device's memory")
        if name in ("index", "index_put", "index_put_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise AssertionError(f"{name} by a mask looks at the device's memory")
        if name in ("_to_copy", "copy_"):
            target = kwargs.get("device") or tensors[0].device
            source = tensors[-1].device
            flag = kwargs.get("non_blocking", False) or (name == "copy_" and args[2:] == (True,))
            if torch.device(target).type != source.type and not flag:
                raise AssertionError(f"{name} from {source} to {target} makes the host wait")
        return func(*args, **kwargs)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A device without memory, on which every read of a tensor fails; the inputs of `download`."""
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: self
    )  # there is no driver to query
    downloaded: list[torch.Tensor] = []

    def download(tensor: torch.Tensor) -> torch.Tensor:
        downloaded.append(tensor)
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(device_scores, "download", download)
    return downloaded


def live_without_memory(worker: DeviceWorker, life: Life, steps: int = 20) -> None:
    for _ in range(steps):
        plan, rows, query = life.next()
        on_device = query.to("meta")
        with NothingWaits():
            worker.step(plan, rows, on_device)


def test_no_step_reads_the_devices_memory(no_memory: list[torch.Tensor]) -> None:
    """Every policy's signals, prompts and decodes, deaths, moves; read back only on request."""
    life = Life(0)
    streams = LateStreams()
    live_without_memory(DeviceWorker(life, streams, "meta"), life)
    assert no_memory == []
    streams.synchronize(10**6)
    assert len(no_memory) > 10
    assert {tensor.device.type for tensor in no_memory} == {"meta"}


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.sum().item(),
        lambda t: t[t > 0],
        lambda t: t.cpu(),
        lambda t: torch.zeros(1).to(t.device),
        lambda t: t.nonzero(),
    ],
    ids=["item", "mask", "to the host", "to the device", "nonzero"],
)
def test_control_a_read_is_noticed(
    no_memory: list[torch.Tensor],
    look: Callable[[torch.Tensor], Any],
) -> None:
    class Curious(DeviceWorker):
        def forward(self, step: PhysicalStep, batch: Batch, query: torch.Tensor) -> None:
            super().forward(step, batch, query)
            look(query)

    life = Life(0)
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
        live_without_memory(Curious(life, LateStreams(), "meta"), life)


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
