"""A worker whose copy engine skips the last layer from when it is told to."""

from __future__ import annotations

from typing import Any

from vtoken.base.arrays import Ints
from vtoken.vllm.cpu.copy_engine import CPUCopyEngine


class BrokenCopyEngine(CPUCopyEngine):
    def copy(self, source: Ints, destination: Ints) -> int:
        layers, self.layers = self.layers, self.layers[:-1]
        try:
            return super().copy(source, destination)
        finally:
            self.layers = layers


class Breakable:
    """What `--worker-extension-cls` adds to a worker."""

    model_runner: Any

    def lose_the_last_layer(self) -> None:
        self.model_runner.vtoken_host.model.copies.__class__ = BrokenCopyEngine
