"""vToken inside vLLM: an out-of-tree plugin, inert unless `VTOKEN_ENABLED=1`.

`register` is vLLM's `vllm.general_plugins` entry point and runs in every vLLM process.
`engine_args` returns the engine arguments that enable vToken, for `vllm.LLM(**engine_args(...))`;
`vtoken serve` passes the same arguments to the server.
"""

from __future__ import annotations

import os
import sys
from typing import Any

ENABLED = "VTOKEN_ENABLED"


def is_enabled() -> bool:
    return os.environ.get(ENABLED) == "1"


def register() -> None:
    """Register backends, spec, manager and the engine's command method; no-op unless enabled."""
    if not is_enabled():
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.engine.core import EngineCore

    from vtoken.vllm.startup import startup_error
    from vtoken.vllm.touchpoints import register

    startup_error.print_at_exit()
    startup_error.keep_memory()
    cuda = bool(current_platform.is_cuda())
    register.check("cuda" if cuda else "cpu")
    if cuda:
        backends = "vtoken.vllm.cuda.backends"
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{backends}.VTokenFlashBackend")
        register_backend(AttentionBackendEnum.TRITON_ATTN, f"{backends}.VTokenTritonBackend")
    else:
        register_backend(AttentionBackendEnum.CPU_ATTN, "vtoken.vllm.cpu.backend.VTokenCPUBackend")
    selector._cached_get_attn_backend.cache_clear()  # an earlier engine may have filled it
    from vtoken.vllm.engine.manager import register_spec
    from vtoken.vllm.engine.request_arguments import check_arguments
    from vtoken.vllm.engine.weights import watch_weights

    register_spec()
    check_arguments()
    watch_weights()
    EngineCore.vtoken_command = _command


def _command(core: Any, payload: bytes) -> bytes:
    reply: bytes = core.scheduler.vtoken_command(payload)
    return reply


def engine_args(config: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Arguments for vLLM's engine that enable vToken; sets the environment variables too.

    `config`: the initial configuration, a merge patch as for `PATCH /vtoken/v1/config`.
    `settings`: see `vtoken.vllm.startup.settings.Settings`.
    """
    os.environ[ENABLED] = "1"
    cuda = settings.get("experimental_cuda", False)
    if not cuda:  # the CPU worker's runner is V1, the CUDA worker's V2, vLLM's default
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    plugins = sys.modules.get("vllm.plugins")
    if plugins is not None and plugins.plugins_loaded:
        register()  # vLLM loads plugins once a process, and did so before vToken was enabled
    return {
        "scheduler_cls": "vtoken.vllm.engine.scheduler.make_scheduler",
        "worker_cls": "vtoken.vllm.cuda.worker.VTokenCUDAWorker"
        if cuda
        else "vtoken.vllm.cpu.worker.VTokenCPUWorker",
        "additional_config": {"vtoken": {"config": config or {}, **settings}},
    }
