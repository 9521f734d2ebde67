"""The methods that the benchmark worker times in each of vToken's model runners."""

from __future__ import annotations

from typing import Any

import pytest

from vtoken.vllm.cpu.runner import VTokenCPURunner
from vtoken.vllm.cuda.runner import VTokenGPURunner, VTokenV2Mixin
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
    timer._wrap("worker", Mixin, Mixin, "step")
    Mixin().step()
    looks = 2  # of the inner pair, inside the outer one
    assert timer.seconds["worker"] == 23 + looks
