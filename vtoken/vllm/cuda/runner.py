"""vToken in vLLM's Model Runner V2, the only one on CUDA: calls `DeviceExecutor` from V2's steps.

Tests run it in V2 itself on the CPU; docs/gpu.md says what has run on a GPU. It relies on these
facts of vLLM 0.32:

- `execute_model` calls `finish_requests`, `add_requests`, `update_requests` and applies the staged
  block tables, in that order, also in a step without tokens; preempted requests are finished and
  come back as new ones.
- a row of a group's block table is what `stage_write` wrote to it, up to its `num_blocks`; later
  appends extend it. vLLM rewrites a row in all groups at once (`append_block_ids`), vToken in one.
- `gather_batch_req_state` returns whether the batch is a uniform decode, the only kind of batch
  with full graphs (`support` refuses modes with others).
- `prepare_attn` is the only place where block tables and slot mappings exist before attention's
  metadata is built. They have the rows and tokens of the graph, with padding of length 0. The
  batch's `seq_lens` stay logical, because the sampler compares them with the prompt's length.
- a captured graph reads what its metadata had at capture: tensors by address, numbers as they were.
- vLLM's memory profile counts what is allocated before it, from the worker's start on.
- when `execute_model` returns, the step's entire forward has been launched.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import BlockTables
from vtoken.vllm.cuda.data_path import CUDADataPath
from vtoken.vllm.cuda.device_executor import DeviceExecutor
from vtoken.vllm.cuda.inputs import Positional
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer, layers_in_graphs
from vtoken.vllm.cuda.support import layer_reasons
from vtoken.vllm.spec import ManagedGroup
from vtoken.vllm.startup import startup_error, support
from vtoken.vllm.startup.cuda_rules import graph_reasons
from vtoken.vllm.startup.settings import read_settings
from vtoken.vllm.worker.executor import Batch, restarted
from vtoken.vllm.worker.managed_layers import managed_layers
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.selftest import SelfTest


class VTokenV2Mixin:
    """Put before a V2 model runner class in the bases.

    `vtoken_blocks`: request -> its blocks of the managed group, which V2 keeps on the device only.
    """

    vtoken_device: DeviceExecutor | None = None
    vtoken_tables: PageTables
    vtoken_blocks: dict[str, list[int]]
    vtoken_group: ManagedGroup
    attn_groups: Any
    block_tables: Any
    req_states: Any
    kv_block_zeroer: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Allocates the page tables too, because vLLM sizes its cache by what is free after it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        self.vtoken_tables = PageTables(runner.max_num_reqs, runner.max_model_len, runner.device)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)  # type: ignore[misc]
        runner: Any = self
        with startup_error.kept():
            self.vtoken_group = support.managed_group(kv_cache_config, runner.vllm_config)
            if not is_profiling:  # then it is a small temporary cache
                self.vtoken_blocks = {}
                support.refuse(*graph_reasons(runner.compilation_config))
                layers = managed_layers(
                    runner.compilation_config.static_forward_context,
                    self.vtoken_group.layer_names,
                    reasons_of=layer_reasons,
                )
                self.vtoken_device = self._vtoken_executor(layers)
            for group in self.attn_groups[self.vtoken_group.index]:
                group.get_metadata_builder().vtoken_tables = self.vtoken_tables

    def _vtoken_executor(self, layers: dict[str, Any]) -> DeviceExecutor:
        """Run the self-test of the data path, then make the executor. The caches must exist.

        Raises UnsupportedError, see `support`, and SelfTestError.
        """
        runner: Any = self
        builder = self.attn_groups[self.vtoken_group.index][0].get_metadata_builder()
        layer = next(iter(layers.values()))
        caches = [managed.kv_cache for managed in layers.values()]
        SelfTest(CUDADataPath(layer, builder, caches[0])).run()
        settings = read_settings(runner.vllm_config.additional_config or {})
        signals = [AttentionLayer.of(managed.impl, managed.kv_cache) for managed in layers.values()]
        for managed, own in zip(layers.values(), signals, strict=True):
            managed.impl.vtoken_signals = own
        for number in layers_in_graphs(len(signals), settings.config):
            signals[number].hold(runner.max_num_reqs, runner.dtype, in_graphs=True)
        return DeviceExecutor(
            caches,
            signals,
            self.vtoken_tables,
            ranks=Ranks.of_this_worker(),
            copy_sync=settings.experiment.copy_sync,
        )

    # ------------------------------------------------------------ before the forward

    def finish_requests(self, scheduler_output: Any) -> None:
        half = self.vtoken_device
        if half is not None:
            half.clear()
            ended = restarted(scheduler_output)
            half.executor.begin(getattr(scheduler_output, "vtoken", None), ended)
            for request_id in ended:
                self.vtoken_blocks.pop(request_id, None)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def add_requests(self, scheduler_output: Any) -> None:
        if self.vtoken_device is not None:
            for request in scheduler_output.scheduled_new_reqs:
                self.vtoken_blocks[request.req_id] = list(
                    request.block_ids[self.vtoken_group.index]
                )
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def update_requests(self, scheduler_output: Any) -> None:
        half = self.vtoken_device
        if half is None:
            super().update_requests(scheduler_output)  # type: ignore[misc]
            return
        with half.executor.ranks.deferred_errors():
            fresh: set[int] = set()
            for request_id, table in half.executor.prepare(self.vtoken_blocks.__getitem__):
                blocks = table.tolist()
                fresh.update(set(blocks).difference(self.vtoken_blocks[request_id]))
                self._vtoken_replace(request_id, blocks)
            half.executor.before_copies()
            if half.executor.plan is not None:
                half.relocate(half.executor.plan, self._vtoken_zero(fresh))
        if _writes_blocks(scheduler_output):
            half.copies.stages.guard()
        super().update_requests(scheduler_output)  # type: ignore[misc]
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None:
                self.vtoken_blocks[request_id].extend(new[self.vtoken_group.index])
        half.executor.apply()

    def _vtoken_replace(self, request_id: str, blocks: list[int]) -> None:
        """Make `blocks` the request's row of the managed group; the other groups keep theirs."""
        group, tables = self.vtoken_group.index, self.block_tables
        row = self.req_states.req_id_to_index[request_id]
        tables.block_tables[group].stage_write(row, 0, blocks)
        tables.num_blocks.np[group, row] = len(blocks)
        self.vtoken_blocks[request_id] = blocks

    def _vtoken_zero(self, blocks: set[int]) -> Callable[[], None] | None:
        """What zeroes `blocks`, which may hold a state of another group, before tokens are copied
        to them; None if nothing is to be zeroed.

        A kernel reads the other slots of a block too, and multiplies them by 0: a NaN would show.
        vLLM zeroes the blocks that it allocates itself, after the copies.
        """
        if self.kv_block_zeroer is None or not blocks:
            return None
        return partial(self.kv_block_zeroer.zero_block_ids, sorted(blocks))

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        state, uniform = super().gather_batch_req_state(  # type: ignore[misc]
            scheduler_output, dummy_run
        )
        if (
            not dummy_run
            and self.vtoken_device is not None
            and self.vtoken_device.leaves_full_graphs
        ):
            uniform = None
        return state, uniform

    def prepare_attn(self, input_batch: Any) -> Any:
        block_tables, slot_mappings = super().prepare_attn(input_batch)  # type: ignore[misc]
        half = self.vtoken_device
        if half is not None:
            group = self.vtoken_group.index
            given = Positional(
                block_tables[group],
                input_batch.seq_lens,
                slot_mappings[group],
                input_batch.seq_lens_cpu_upper_bound.numpy().copy(),
            )
            half.present(self._vtoken_batch(input_batch), given)
            half.copies.stages.guard()
        return block_tables, slot_mappings

    def _vtoken_batch(self, input_batch: Any) -> Batch:
        names: list[str] = input_batch.req_ids

        def tables(rows: Ints) -> BlockTables:
            return BlockTables.of([self.vtoken_blocks[names[row]] for row in rows.tolist()])

        starts, computed = input_batch.query_start_loc_np, input_batch.num_computed_tokens_np
        return Batch.of(names, starts, computed, tables)

    # ------------------------------------------------------------ after the forward

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        half = self.vtoken_device
        if half is None:
            return output
        if output is not None:  # a step without tokens: the output is a singleton, do not change it
            return half.executor.attach(copy(output))
        half.forward_ended()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.vtoken_device is None:
            return output
        self.vtoken_device.clear()
        return self.vtoken_device.executor.attach(output)


def _writes_blocks(scheduler_output: Any) -> bool:
    """Whether vLLM itself clears or copies blocks before the step's forward."""
    return bool(scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies)


class VTokenGPURunner(VTokenV2Mixin, GPUModelRunner):
    """vLLM's V2 runner on CUDA with token-level virtualization."""
