"""vLLM's Model Runner V2 with vToken's CUDA worker, on a machine without a GPU.

`keep_triton` comes before any other import of vLLM. The kernels run in Triton's interpreter, which
importing Triton selects; so all of this needs a process of its own with `ENVIRONMENT`.
"""

from __future__ import annotations

from typing import Any

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "HF_HUB_OFFLINE": "1",
}


def keep_triton() -> None:
    """Prevent vLLM from disabling Triton on a CPU."""
    import torch
    import vllm.platforms as platforms

    assert platforms.current_platform.device_type == "cpu"
    platforms.vllm_version_matches_substr = lambda _: False  # "no Triton on the CPU build"
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # vLLM's cache kernel picks a size by it
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON


def attend_with_triton() -> None:
    """Make vToken's plugin register its Triton attention for CPUs."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vtoken import vllm as plugin

    register = plugin.register

    def register_triton() -> None:
        register()
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vtoken.vllm.cuda.backends.VTokenTritonBackend"
        )

    plugin.register = register_triton


def use_triton(half: Any) -> Any:
    """The `DeviceExecutor` with vToken's kernels, as on a device."""
    from vtoken.vllm.cuda.kernels import TritonHostRows, TritonSlotCopy

    layers = half.copies._layers  # noqa: SLF001
    half.copies._direct = TritonSlotCopy(layers)  # noqa: SLF001
    half.host_copies.rows = TritonHostRows(layers)
    return half
