"""A worker whose copy engine skips the last layer after the self-test has passed."""

from __future__ import annotations

from typing import Any

from vtoken.base.arrays import Ints
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine
from vtoken.vllm.cpu.worker import VTokenCPUWorker


class BrokenCopyEngine(CPUCopyEngine):
    def copy(self, source: Ints, destination: Ints) -> int:
        layers, self._layers = self._layers, self._layers[:-1]
        try:
            return super().copy(source, destination)
        finally:
            self._layers = layers


class BrokenWorker(VTokenCPUWorker):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.model_runner.vtoken_host.copies.__class__ = BrokenCopyEngine
        return super().execute_model(*args, **kwargs)
