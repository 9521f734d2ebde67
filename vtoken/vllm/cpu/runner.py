"""vToken in vLLM's model runner on CPU: executes the step plan.

Positions stay logical. Only the inputs of attention are physical: block tables, slot mapping and
sequence lengths of the requests that have evicted something.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.base.arrays import Ints
from vtoken.core.protocol.mirror import BlockTables
from vtoken.vllm.cpu.data_path import CPUDataPath
from vtoken.vllm.cpu.drafter import VTokenDrafterMixin
from vtoken.vllm.cpu.host_executor import HostExecutor, KVStore
from vtoken.vllm.cpu.layout import learn_layout
from vtoken.vllm.drafts import NO_DRAFTS, num_drafts, num_rejected
from vtoken.vllm.spec import ManagedGroup
from vtoken.vllm.startup import startup_error, support
from vtoken.vllm.worker.executor import Batch, StepExecutor, restarted
from vtoken.vllm.worker.managed_layers import managed_layers
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.selftest import SelfTest
from vtoken.vllm.worker.stages import Stages, stages_of_this_worker


class VTokenCPURunner(CPUModelRunner):
    """vLLM's model runner V1 on the host, where everything runs in one thread, in program order."""

    executor: StepExecutor | None = None  # None: the cache does not exist yet
    vtoken_host: HostExecutor
    vtoken_group: ManagedGroup
    vtoken_stages: Stages
    intermediate_tensors: Any
    drafter: Any
    requests: dict[str, Any]
    input_batch: Any
    _vtoken_zeroes = False
    _vtoken_drafts = NO_DRAFTS  # of the requests that have any in this step

    @classmethod
    def adopt(cls, runner: Any) -> Any:
        """Turn a constructed runner of the base class into this one."""
        runner.__class__ = cls
        return runner

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """As vLLM's, but the state within a prompt is cached at the end of a step alone.

        vLLM's Mamba 2 layers offer it from inside a step, which their CPU kernel does not compute.
        """
        specs: dict[str, Any] = super().get_kv_cache_spec()
        return {name: _without_checkpoints(spec) for name, spec in specs.items()}

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if is_profiling:
            return  # a small temporary cache
        with startup_error.kept():
            group = support.managed_group(kv_cache_config, self.vllm_config)
            self.vtoken_group = group
            self.vtoken_stages = stages_of_this_worker(self.vllm_config, len(group.layer_names))
            known = self.compilation_config.static_forward_context
            first = self.vtoken_stages.first_layer
            layers = managed_layers(known, group.layer_names, first)
            drafter_layers = managed_layers(known, group.drafter_names, first + len(layers))
            self.vtoken_host = self._vtoken_prepare(layers, drafter_layers)
            if self.vllm_config.num_lookahead_tokens:
                VTokenDrafterMixin.adopt(self.drafter, group.drafter_names)
            self.executor = self.vtoken_host.executor
        self._vtoken_zeroes = kv_cache_config.needs_kv_cache_zeroing

    def _vtoken_prepare(
        self, layers: dict[str, Any], drafter_layers: dict[str, Any]
    ) -> HostExecutor:
        """Run the self-test of the data path, then make the executor. The caches must exist."""
        caches, layer = [layer.kv_cache for layer in layers.values()], next(iter(layers.values()))
        layout = learn_layout(caches[0], layer.isa)
        first, *others = self.attn_groups[self.vtoken_group.index]
        for attn_group in others:
            attn_group.get_metadata_builder().of_drafter = drafter_layers.keys() >= {
                *attn_group.layer_names
            }
        SelfTest(CPUDataPath(layer, first.get_metadata_builder(), caches[0], layout)).run()
        self._vtoken_make_room()
        return HostExecutor(
            KVStore(caches, layout),
            layer.impl.num_heads,
            first_layer=self.vtoken_stages.first_layer,
            ranks=Ranks.of_this_worker(),
            stages=self.vtoken_stages,
            zero=self._vtoken_zero if len(self.kv_cache_config.kv_cache_groups) > 1 else None,
            drafter=self._vtoken_drafter(drafter_layers) if drafter_layers else None,
            lookahead=self.vllm_config.num_lookahead_tokens,
        )

    def _vtoken_drafter(self, layers: dict[str, Any]) -> KVStore:
        """The caches of the drafter's `layers`; runs the self-test on them too."""
        layer = next(iter(layers.values()))
        layout = learn_layout(layer.kv_cache, layer.isa)
        builder = self.drafter.draft_attn_groups[0].get_metadata_builder()
        SelfTest(CPUDataPath(layer, builder, layer.kv_cache, layout)).run()
        return KVStore([layer.kv_cache for layer in layers.values()], layout)

    def _vtoken_make_room(self) -> None:
        """Make the tensors into which a later stage of a pipeline takes hidden states.

        vLLM makes them in its warm-up, which its CPU build leaves out with --enforce-eager.
        """
        if self.vtoken_stages.first_layer and self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    # ------------------------------------------------------------ before the forward

    def _update_states(self, scheduler_output: Any) -> Any:
        executor, plan = self.executor, getattr(scheduler_output, "vtoken", None)
        if executor is None:
            return super()._update_states(scheduler_output)
        self.vtoken_host.clear()
        if plan is None:
            self._vtoken_drafts = NO_DRAFTS
            executor.begin(None, ())
            return super()._update_states(scheduler_output)
        self._vtoken_drafts = num_drafts(scheduler_output)
        executor.begin(plan, restarted(scheduler_output), self._vtoken_drafts)
        with executor.stages.told_of_errors():
            with executor.ranks.deferred_errors():
                self._vtoken_replace_tables()
                executor.before_copies()
                self.vtoken_host.relocate(plan)
            result = super()._update_states(scheduler_output)
            executor.apply()
        return result

    def _vtoken_replace_tables(self) -> None:
        """Give the requests whose blocks changed their new block tables."""
        assert self.executor is not None
        for request_id, table in self.executor.prepare(self._vtoken_blocks):
            blocks, held = table.tolist(), self._vtoken_blocks(request_id)
            self._vtoken_zero(set(blocks).difference(held))
            held[:] = blocks
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                self._vtoken_table.add_row(blocks, row)

    def _vtoken_blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self.requests[request_id].block_ids[self.vtoken_group.index]
        return blocks

    def _vtoken_zero(self, blocks: Iterable[int]) -> None:
        """Zero `blocks`, which may hold a state of another group, before tokens are copied to them.

        A kernel reads the other slots of a block too, and multiplies them by 0: a NaN would show.
        vLLM zeroes the blocks that it allocates itself, after the copies.
        """
        if self._vtoken_zeroes and (found := sorted(blocks)):
            self._zero_block_ids(found)

    @property
    def _vtoken_table(self) -> Any:
        """vLLM's block tables of the managed group."""
        return self.input_batch.block_table[self.vtoken_group.index]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.executor is not None:
            self.vtoken_host.present(self._vtoken_batch(), self._vtoken_table.slot_mapping.gpu)
        return prepared

    def _vtoken_batch(self) -> Batch:
        batch, table = self.input_batch, self._vtoken_table
        starts: np.ndarray = self.query_start_loc.np

        def tables(rows: Ints) -> BlockTables:
            blocks: Any = table.block_table.np
            counts = table.num_blocks_per_row[rows].astype(np.int64)
            return BlockTables(blocks.reshape(-1), rows * blocks.shape[1], counts)

        return Batch.of(batch.req_ids, starts, batch.num_computed_tokens_cpu, tables)

    # ------------------------------------------------------------ after the forward

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if output is EMPTY_MODEL_RUNNER_OUTPUT and self.executor is not None:
            return self.executor.attach(copy(output))  # a singleton: do not change it
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self.executor is None:
            return output
        self.vtoken_host.clear()
        if self._vtoken_drafts:
            self.executor.reject(num_rejected(self._vtoken_drafts, output))
        return self.executor.attach(output)


def _without_checkpoints(spec: Any) -> Any:
    """A `spec` of states of which none is cached from inside a step; any other spec unchanged."""
    if not isinstance(spec, MambaSpec):
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
