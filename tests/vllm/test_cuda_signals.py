"""Signals on a device, up to the device calls: the host's scores, however late they are reported.

Two workers execute the same steps: one with the host's probe and accumulators, which is the oracle,
and one with the device's. A late device runs work on side streams only when a thread waits for it.
A device without memory (`meta`) proves that no tensor is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.two_workers import SIGNALS, DeviceWorker, Life, Worker
from vtoken.base.arrays import Floats
from vtoken.core.protocol.mirror import Mirror
from vtoken.core.protocol.step import WorkerReport
from vtoken.policies.signals import Signal, make_accumulator
from vtoken.vllm.cuda import kernels
from vtoken.vllm.cuda.copies.streams import HostStreams, Stream
from vtoken.vllm.cuda.signals import scores as device_scores
from vtoken.vllm.cuda.signals.accumulators import DeviceArrays
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.delivery import attach_report
from vtoken.vllm.worker.executor import Batch, PhysicalStep
from vtoken.vllm.worker.scores import PendingScores

pytestmark = pytest.mark.vllm

Scores = dict[tuple[str, Signal], Floats]


class LateStreams(HostStreams):
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
    """The scores of `other` that differ; means of windows and neighbours may differ by rounding."""
    wrong = [f"{key} is reported by only one" for key in one.keys() ^ other.keys()]
    for key in one.keys() & other.keys():
        signal = key[1]
        averages = signal.definition.queries == "window" and signal.definition.linear
        rounds = averages or (signal.pool_radius and signal.pool == "mean")
        same = len(one[key]) == len(other[key]) and np.allclose(
            one[key], other[key], rtol=1e-6 if rounds else 0.0, atol=1e-7 if rounds else 0.0
        )
        if not same:
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


def test_control_copying_tensors_that_later_steps_write_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InPlace(list[torch.Tensor]):
        """The accumulators' own tensors instead of an outbox, read when the copy runs."""

        def split(self, _sizes: Any) -> list[torch.Tensor]:
            return self

    monkeypatch.setattr(device_scores, "download", lambda boxes: InPlace(b.clone() for b in boxes))
    monkeypatch.setattr(device_scores, "_outbox", InPlace)
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
        def __getitem__(self, key: Any) -> Any:
            ids, num_tokens = super().__getitem__(key)
            now = mirrors[key[0]].live()[0][: len(ids)]
            same_number = len(now) == len(ids)
            return (now, int(now[-1]) + 1) if same_number else (ids, num_tokens)

    monkeypatch.setattr(DeviceScores, "finish", finish_and_note)
    monkeypatch.setattr(
        DeviceScores, "_send", lambda self, values, owners: send(self, values, Now(owners))
    )
    assert run_two_workers(0, late_steps=3)[0] != []


@pytest.mark.parametrize(
    ("signal", "bytes_a_token"),
    [(Signal("attention_sum"), 4), (Signal("attention_window", 64), 256)],
    ids=str,
)
def test_device_memory_follows_the_live_tokens(signal: Signal, bytes_a_token: int) -> None:
    accumulator: Any = make_accumulator(signal, DeviceArrays(torch.device("cpu")))
    ids = np.arange(8000)
    accumulator.add(ids, torch.zeros(1, 8000), 1)
    assert accumulator._data.nbytes <= 1.3 * 8000 * bytes_a_token
    accumulator.add(ids[-500:] + 1, torch.zeros(1, 500), 1)
    assert accumulator._data.nbytes <= 2 * 500 * bytes_a_token


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


@pytest.mark.parametrize("use_triton", [False, True], ids=["plain torch", "around the kernel"])
def test_no_step_reads_the_devices_memory(
    no_memory: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, *, use_triton: bool
) -> None:
    """Every policy's signals, prompts and decodes, deaths, moves; read back only on request."""
    launches: list[torch.Tensor] = []
    monkeypatch.setattr(kernels, "probe_scores", lambda query, *_, **__: launches.append(query))
    life = Life(0)
    streams = LateStreams()
    worker = DeviceWorker(life, streams, "meta")
    worker.use_triton = use_triton
    live_without_memory(worker, life)
    assert bool(launches) == use_triton
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
