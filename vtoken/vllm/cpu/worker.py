"""vToken's CPU worker: vLLM's own with vToken's model runner."""

from __future__ import annotations

from typing import Any

import numba
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.base.errors import UnsupportedError
from vtoken.vllm.cpu import states
from vtoken.vllm.cpu.runner import VTokenCPURunner
from vtoken.vllm.startup import startup_error, support


class VTokenCPUWorker(CPUWorker):
    model_runner: Any
    _step_error: Exception | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with startup_error.kept():
            if vllm_config.use_v2_model_runner:  # vLLM itself only misses Triton
                raise UnsupportedError(
                    "vToken cannot serve model runner V2 on CPU: set VLLM_USE_V2_MODEL_RUNNER=0, "
                    "and leave features out that make vLLM choose V2"
                )
            # vLLM compares the machine's memory with what it is to take.
            super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        with startup_error.kept():
            support.check_config(self.vllm_config)
            super().init_device()
        _launch_numba()
        if self.vllm_config.num_speculative_tokens and self.model_config.is_hybrid:
            states.fill_rows()
        self.model_runner = VTokenCPURunner.adopt(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        executor = self.model_runner.executor
        plan = getattr(scheduler_output, "vtoken", None)
        self._step_error = None
        try:
            if plan is not None and executor is not None:
                executor.stages.wait(plan)  # vLLM waits for the earlier stage's hidden states next
            return super().execute_model(scheduler_output)
        except Exception as error:
            self._step_error = error
            raise

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; of a step that failed, its error.

        With several steps in flight vLLM reads only this answer, which would have no tokens.
        """
        if self._step_error is not None:
            raise self._step_error
        return super().sample_tokens(grammar_output)


def _launch_numba() -> None:
    """Launch Numba's threads now, and give OpenMP the number of threads back that it had.

    vLLM's n-gram drafter is a parallel kernel of Numba. Numba's OpenMP layer, when launched, sets
    the number of threads of all OpenMP regions to that of the cores, vLLM's own kernels included:
    where the cores are busy, each of them then waits for its slowest thread.
    """
    num_threads = torch.get_num_threads()
    numba.get_num_threads()
    torch._C.set_num_threads(num_threads)  # vLLM has replaced `torch.set_num_threads`
