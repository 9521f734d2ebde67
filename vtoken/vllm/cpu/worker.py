"""vToken's CPU worker: vLLM's own with vToken's model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.vllm.cpu.runner import VTokenCPURunner
from vtoken.vllm.startup import startup_error, support


class VTokenCPUWorker(CPUWorker):
    model_runner: Any

    def init_device(self) -> None:
        with startup_error.kept():
            support.check_config(self.vllm_config)
        super().init_device()
        self.model_runner = VTokenCPURunner.adopt(self.model_runner)
