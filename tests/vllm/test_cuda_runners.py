"""What vToken needs of vLLM on CUDA, and what it refuses there.

Its runner runs in vLLM's own in `test_cuda_interpreted.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cpu.worker import VTokenCPUWorker
from vtoken.vllm.cuda.support import layer_reasons
from vtoken.vllm.startup import support
from vtoken.vllm.startup.cuda_rules import OPT_IN, cuda_reasons
from vtoken.vllm.touchpoints import register

pytestmark = pytest.mark.vllm

S, BLOCKS = 4, 12


def test_this_vllm_has_every_touch_point_of_its_runner() -> None:
    assert register.differences("cuda") == []
    targets = [point.target for point in register.TOUCH_POINTS if point.device == "cuda"]
    assert any("worker.gpu.model_runner" in target for target in targets)


def test_the_cpu_worker_refuses_model_runner_v2() -> None:
    with pytest.raises(UnsupportedError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        VTokenCPUWorker(SimpleNamespace(use_v2_model_runner=True))


def configuration(
    mode: str = "FULL_AND_PIECEWISE",
    *,
    v2: bool = True,
    ubatching: bool = False,
    sleeps: bool = False,
    num_stages: int = 1,
) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=v2,
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
        parallel_config=SimpleNamespace(use_ubatching=ubatching, pipeline_parallel_size=num_stages),
    )


def refused(config: Any, *, experimental: bool) -> list[str]:
    return [*cuda_reasons(config, experimental=experimental)]


def test_cuda_is_refused_without_the_opt_in() -> None:
    assert refused(configuration(), experimental=False) == [f"CUDA: {OPT_IN}"]
    assert "docs/gpu.md" in OPT_IN
    assert refused(configuration(), experimental=True) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (configuration("FULL"), "cudagraph mode FULL"),
        (configuration(v2=False), "model runner V1 on CUDA: unset VLLM_USE_V2_MODEL_RUNNER"),
        (configuration(ubatching=True), "microbatching"),
        (configuration(sleeps=True), "sleep mode: "),
        (configuration(num_stages=2), "pipeline parallelism on CUDA: "),
    ],
)
def test_the_opt_in_does_not_allow_everything(config: Any, reason: str) -> None:
    assert [why.startswith(reason) for why in refused(config, experimental=True)] == [True]


def layer(**impl: Any) -> Any:
    cache = torch.zeros(BLOCKS, S, 2, 8).permute(0, 2, 1, 3)
    return SimpleNamespace(impl=SimpleNamespace(**impl), kv_cache=cache)


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ({}, "use --attention-backend FLASH_ATTN"),
        ({"vtoken_paged_impl": True, "vllm_flash_attn_version": 2}, "FlashAttention 2 needs pages"),
        ({"vtoken_paged_impl": True, "use_td": True}, "unset VLLM_TRITON_USE_TD"),
    ],
)
def test_a_backend_that_cannot_read_single_slots_is_refused_by_name(
    impl: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        support.check_layers({"layer 0": layer(**impl)}, layer_reasons)
    support.check_layers({"layer 0": layer(vtoken_paged_impl=True)}, layer_reasons)
