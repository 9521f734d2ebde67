"""The methods that the benchmark worker times in each of vToken's model runners, and forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtoken.vllm.cpu.runner import VTokenCPURunner
from vtoken.vllm.cuda.runner import VTokenGPURunner, VTokenV2Mixin
from vtoken_bench.vllm.forwards import Forwards
from vtoken_bench.vllm.worker import V1_HOOKS, V2_HOOKS, HookTimer, _extended, _runner_hooks

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("runner", "owner", "names"),
    [
        (VTokenCPURunner, VTokenCPURunner, V1_HOOKS),
        (VTokenGPURunner, VTokenV2Mixin, V2_HOOKS),
    ],
    ids=["CPU, V1", "CUDA, V2"],
)
def test_every_hook_extends_a_method_of_vllm(
    runner: type, owner: type, names: tuple[str, ...]
) -> None:
    assert _runner_hooks(runner) == (owner, names)
    for name in names:
        assert name in vars(owner)
        assert _extended(runner, owner, name).__module__.startswith("vllm.")


class Clock:
    """Advances by one second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def test_code_between_the_mixin_and_vllm_counts_as_vtokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("vtoken_bench.vllm.worker.time", clock)

    class Stock:
        def step(self) -> None:
            clock.now += 100

    class Guard(Stock):
        def step(self) -> None:
            clock.now += 20
            super().step()

    class Mixin(Guard):
        def step(self) -> None:
            clock.now += 3
            super().step()

    Guard.__module__ = Mixin.__module__ = "vtoken.vllm.worker"
    timer: Any = HookTimer(None, None)
    timer._wrap("scheduler", Mixin, Mixin, "step")
    Mixin().step()
    looks = 2  # of the inner pair, inside the outer one
    assert timer.seconds["scheduler"] == 23 + looks


class Event:
    """Of a GPU that takes a millisecond more for each call."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def advance(ms: float) -> None:
    Event.now += ms


def test_forwards_are_timed_on_the_gpu_and_counted_by_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("is_available", lambda: True),
        ("synchronize", lambda: None),
        ("Event", Event),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    seen: list[Any] = []
    scheduler = SimpleNamespace(update_from_output=lambda *both: seen.append(both))
    runner = SimpleNamespace(
        step_timing=SimpleNamespace(forward_start=lambda: advance(100)),
        kv_connector=SimpleNamespace(finish_forward=lambda: advance(1000)),
    )
    forwards = Forwards(scheduler, runner)

    def step(mode: str | None, *scheduled: int, ms: float = 4) -> None:
        runner.step_timing.forward_start()
        advance(ms)
        runner.kv_connector.finish_forward()
        stats = None if mode is None else SimpleNamespace(runtime_mode=mode)
        counts = {str(n): count for n, count in enumerate(scheduled)}
        step = SimpleNamespace(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(scheduled)
        )
        scheduler.update_from_output(step, SimpleNamespace(cudagraph_stats=stats))

    step("FULL", 1)
    forwards.reset()
    for mode, scheduled in (("FULL", (1, 1)), ("FULL", (1,)), ("PIECEWISE", (1, 7)), (None, (1,))):
        step(mode, *scheduled)
    assert forwards.facts() == {
        "computed_tokens": 12,
        "graphs": {
            "decode": {"FULL": 2, "PIECEWISE": 0, "NONE": 0},
            "mixed": {"FULL": 0, "PIECEWISE": 1, "NONE": 0},
        },
        "gpu_seconds": pytest.approx(4 * 0.004),
    }
    assert len(seen) == 5  # vLLM's own call is made


def test_model_runner_v2_has_the_places_between_which_a_forward_is_timed() -> None:
    import inspect

    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    step = inspect.getsource(GPUModelRunner.execute_model)
    first, last = (
        step.index(call)
        for call in ("self.step_timing.forward_start()", "self.kv_connector.finish_forward()")
    )
    for forward in ("run_fullgraph(", "run_pw_graph(", "self.model(**model_inputs)"):
        assert first < step.index(forward) < last
