"""vToken in vLLM's V1 model runner on CUDA: calls `DeviceExecutor` from the runner's steps.

Never run on a GPU. It relies on these facts of vLLM 0.32: `_model_forward` launches the model;
before it, only the clearing and copying of blocks in `_update_states` touches the KV cache;
`_determine_batch_execution_and_padding` picks the graph after `_prepare_inputs`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.cuda.data_path import CUDADataPath
from vtoken.vllm.cuda.device_executor import DeviceExecutor
from vtoken.vllm.cuda.support import check_layers
from vtoken.vllm.startup.settings import read_settings
from vtoken.vllm.worker.executor import PhysicalStep, StepExecutor
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.runner_v1 import VTokenRunnerMixin
from vtoken.vllm.worker.selftest import SelfTest


def writes_blocks(scheduler_output: Any) -> bool:
    """Whether vLLM itself clears or copies blocks before the step's forward."""
    return bool(scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies)


def make_executor(runner: Any, layers: dict[str, Any]) -> DeviceExecutor:
    """Run the self-test of `runner`'s data path, then make its executor. The caches must exist.

    Raises UnsupportedError, see `support`, and SelfTestError.
    """
    check_layers(layers, runner.compilation_config)
    builder = runner.attn_groups[runner.vtoken_group.index][0].get_metadata_builder()
    layer = next(iter(layers.values()))
    caches = [managed.kv_cache for managed in layers.values()]
    SelfTest(CUDADataPath(layer, builder, caches[0])).run()
    settings = read_settings(runner.vllm_config.additional_config or {})
    num_heads = layer.impl.num_heads
    return DeviceExecutor(
        caches,
        num_heads,
        runner.device,
        ranks=Ranks.of_this_worker(),
        copy_sync=settings.experiment.copy_sync,
    )


class GuardedRunnerMixin:
    """Makes vLLM's cache accesses wait for the relocations, on the device (I3).

    Put it between `VTokenRunnerMixin`, which launches the copies, and a V1 runner.
    """

    vtoken_device: DeviceExecutor | None = None

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.vtoken_device is not None and writes_blocks(scheduler_output):
            self.vtoken_device.copies.stages.guard()
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.vtoken_device is None:
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        self.vtoken_device.copies.stages.guard()
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        self.vtoken_device.forward_ended()
        return output

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self.vtoken_device is not None and self.vtoken_device.leaves_full_graphs:
            # Full graphs exist only for uniform decodes (`support` refuses other modes). All other
            # batches run piecewise, with attention outside the graphs, or eagerly.
            kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]


class DeviceRunnerMixin(VTokenRunnerMixin):
    """Implements the device's three methods of `VTokenRunnerMixin` with a `DeviceExecutor`."""

    vtoken_device: DeviceExecutor | None = None

    def _vtoken_prepare(self, layers: dict[str, Any]) -> StepExecutor:
        self.vtoken_device = make_executor(self, layers)
        return self.vtoken_device.executor

    def _vtoken_copy(self, plan: StepPlan) -> None:
        assert self.vtoken_device is not None
        self.vtoken_device.relocate(plan)

    def _vtoken_present(self, step: PhysicalStep | None) -> None:
        assert self.vtoken_device is not None
        slot_mapping = self._vtoken_table.slot_mapping.gpu
        self.vtoken_device.present(step, slot_mapping)


class VTokenGPURunner(DeviceRunnerMixin, GuardedRunnerMixin, GPUModelRunner):
    """vLLM's V1 runner on CUDA with token-level virtualization."""
