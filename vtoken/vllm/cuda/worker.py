"""vToken's CUDA worker: vLLM's own with vToken's model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vtoken.vllm.cuda.runner import VTokenGPURunner
from vtoken.vllm.startup import startup_error, support


class VTokenCUDAWorker(Worker):
    def init_device(self) -> None:
        with startup_error.kept():
            support.check_config(self.vllm_config)
            super().init_device()

    def _make_model_runner(self) -> Any:
        return VTokenGPURunner(self.vllm_config, self.device)
